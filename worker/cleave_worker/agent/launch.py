"""Builds arguments and environment for one boot of an engine.

Pure functions of the agent's configuration and of this boot's resources (ports, cores, load page);
called by the supervisor at every start. The boot id is also the engine id of the KV transfer, so
that a handoff of an earlier boot is never taken for one of this boot.
"""

import importlib.util
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cleave.rpc import boot_ids
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV, TOKEN_ENV
from cleave.rpc.engine_key import ENV as ENGINE_KEY_ENV
from cleave.rpc.revision import WEIGHTS_ENV
from cleave.shm.load_page import ENV as LOAD_PAGE_ENV
from cleave_worker.access.engine_access import MIDDLEWARE
from cleave_worker.agent.config import GANG_KEY_ENV, OVERLAPPED_TRANSFERS, AgentConfig
from cleave_worker.agent.cpu_cores import build_omp_binding
from cleave_worker.agent.weights.engine_arguments import get_option, remove_option
from cleave_worker.agent.weights.loaded_weights import NO_WEIGHTS, Weights
from cleave_worker.scheduling.config_page import ENV as SCHEDULING_PAGE_ENV

_KV_TRANSFER = "--kv-transfer-config"
_EXTRA_CONFIG = "kv_connector_extra_config"
_CLEAVE_CONNECTOR = {
    "kv_connector": "CleaveConnector",
    "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
    "kv_load_failure_policy": "recompute",
}
_KV_OFFLOADING = "--kv-offloading-size"
_SCHEDULER = "--scheduler-cls"
_ENABLE_LORA = "--enable-lora"
_REFUSED = (
    ("--api-key", "VLLM_API_KEY", "gateways send the key that the agent makes"),
    ("--config", None, "the agent reads arguments, and no file of them: list them one by one"),
    (None, "VLLM_MODEL_REDIRECT_PATH", "vLLM would load another model: name that as the model"),
)
"""Options of vLLM, variables, and why neither is possible."""
_ENV_WITHOUT_NVCC = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
_ARGUMENTS_WITHOUT_NVCC = ("--gdn-prefill-backend", "triton")
"""vLLM 0.32 chooses FlashInfer and DeepGEMM on Hopper and later by default. Both compile their
kernels with nvcc, which CUDA's wheels do not contain; without it the engine ends in its warm-up.
`cleave_worker.vllm.flashinfer` disables the rest of FlashInfer."""
_DO_NOT_TRACK = "DO_NOT_TRACK"
_TELEMETRY_SWITCHES = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY")
"""Variables that switch off usage statistics of vLLM, and of the libraries of Hugging Face."""
_NO_DOMAIN = "none.invalid"
"""A host that cannot exist (RFC 2606)."""
_CACHE_FOLDERS = (
    "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip
_CACHE_REMEDY = (
    "kernels are compiled again in each new pod; to keep them, make the folder of "
    f" spec.model.cache writable for user {os.getuid()}: "
    f"`chown {os.getuid()} FOLDER` on the node, for a hostPath, or on the volume"
)


class LaunchError(ValueError):
    """The engine's arguments contradict what the agent must set."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the engines of one common start of data-parallel ranks meet."""

    host: str
    """Address of rank 0's pod; of the loopback device if all ranks share the pod."""
    port: int
    """Where the engine of rank 0 listens for those of the other ranks."""


@dataclass(frozen=True, slots=True)
class Boot:
    """Ports, cores, pages and ids of one start of the engine."""

    boot_id: str
    engine_port: int
    kv_port: int
    load_page: Path
    scheduling_page: Path | None = None
    """None: no role has a scheduling configuration."""
    cores: tuple[int, ...] = ()
    """Empty: not pinned."""
    gpu: bool = False
    engine_key: str = field(default="", repr=False)
    """What the engine asks for; empty: nothing."""
    prefix_port: int = 0
    """Where CleaveConnector serves the prefix cache; 0: nowhere."""
    meeting_point: MeetingPoint | None = None
    """Of data-parallel ranks; None: there are none."""
    weights: Weights = NO_WEIGHTS
    """What it is to load."""
    model: str = ""
    """Path under which it is to load the model; empty: that of the configuration."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def create_boot_id(config: AgentConfig) -> str:
    """Return a new boot id, which the KV transfer takes for its engine id: vLLM 0.32 appends the
    data-parallel rank to that (`EngineCoreProc.run_engine_core`)."""
    return boot_ids.create_boot_id(config.name) + _get_rank_suffix(config)


def build_engine_launch(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """Build the engine's process. Raises LaunchError, CoresError."""
    user_arguments, kv_transfer = _extract_kv_transfer_config(config)
    arguments = [
        "--host", config.host,
        "--port", str(boot.engine_port),
        "--model", boot.model or config.model,
        "--served-model-name", config.served_model_name,
        _KV_TRANSFER, json.dumps(_build_kv_transfer_config(config, boot, kv_transfer)),
    ]  # fmt: skip
    if config.max_model_len:
        arguments += ["--max-model-len", str(config.max_model_len)]
    if config.engine == "vllm":
        arguments += _build_vllm_arguments(config, boot, base_env)
        arguments += _build_scheduler_arguments(config, boot)
        if boot.engine_key:
            arguments += ["--middleware", MIDDLEWARE]
    module = {
        "vllm": "cleave_worker.vllm.api_server",
        "emulated": "cleave_worker.emulator.main",
    }[config.engine]
    argv = (
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
        *_set_commits(user_arguments, boot.weights),
        *_build_adapter_slots(config, boot),
    )
    return Launch(argv, _build_environment(config, boot, base_env))


def build_headless_launch(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """Build vLLM's process on a further node of an instance; `boot` is the leader's. Its KV has the
    leader's engine id, as handoffs name only that. Raises LaunchError."""
    user_arguments, kv_transfer = _extract_kv_transfer_config(config)
    arguments = [
        "--model", boot.model or config.model,
        _KV_TRANSFER, json.dumps(_build_kv_transfer_config(config, boot, kv_transfer)),
    ]  # fmt: skip
    if config.max_model_len:
        arguments += ["--max-model-len", str(config.max_model_len)]
    arguments += _build_vllm_arguments(config, boot, base_env)
    module = "cleave_worker.vllm.headless"
    argv = (
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
        *_set_commits(user_arguments, boot.weights),
        *_build_adapter_slots(config, boot),
    )
    return Launch(argv, _build_environment(config, boot, base_env))


def read_block_size(config: AgentConfig, gpu: bool) -> int:
    """Return the tokens per KV block: --block-size, else the engine's default."""
    text = get_option(config.engine_args, "--block-size")
    if text and text.isdigit():
        return int(text)
    return 128 if config.engine == "vllm" and not gpu else 16


def read_max_adapters(config: AgentConfig) -> int:
    """Return the number of adapters that the engine holds at a time."""
    text = get_option(config.engine_args, "--max-loras")
    return int(text) if text and text.isdigit() else 1


def _build_adapter_slots(config: AgentConfig, boot: Boot) -> list[str]:
    """More slots for adapters than asked for on CPU, of which the last one stays empty: vLLM there
    computes a request without an adapter by its weights if another one of the batch has an adapter
    (vLLM PR 48421). While sources change, old and new adapters have slots."""
    if config.engine != "vllm" or boot.gpu or not can_load_adapters(config):
        return []
    slots = 2 * read_max_adapters(config) + 1
    kept = get_option(config.engine_args, "--max-cpu-loras")
    cached = ["--max-cpu-loras", str(max(int(kept), slots))] if kept and kept.isdigit() else []
    return ["--max-loras", str(slots), *cached]


def can_load_adapters(config: AgentConfig) -> bool:
    """Return whether the engine is started with --enable-lora, so that it can have adapters."""
    return any(arg.replace("_", "-") == _ENABLE_LORA for arg in config.engine_args)


def has_gpu() -> bool:
    """Return whether this machine has a GPU of NVIDIA or AMD, without loading CUDA or torch."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
        return True
    return shutil.which("nvidia-smi") is not None


def has_nvcc(env: Mapping[str, str]) -> bool:
    """Return whether a process with `env` finds nvcc, by the rule of FlashInfer and DeepGEMM."""
    if home := env.get("CUDA_HOME") or env.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc") is not None
    path = env.get("PATH", os.defpath)
    return any(shutil.which(nvcc, path=path) for nvcc in ("nvcc", "/usr/local/cuda/bin/nvcc"))


def find_cache_faults(env: Mapping[str, str]) -> dict[str, str]:
    """Return why folders for compiled kernels cannot be written, by variable. Creates the others.
    The engine starts without these variables: it then compiles again, in its default folders."""
    folders = ((name, env[name]) for name in _CACHE_FOLDERS if env.get(name))
    faults = ((name, _explain_unwritable(folder)) for name, folder in folders)
    return {name: f"{name}: {fault}; {_CACHE_REMEDY}" for name, fault in faults if fault}


def _explain_unwritable(folder: str) -> str:
    """Why a folder cannot be written; empty: it can. Creates it."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return f"{error.strerror}: {folder}"
    if not os.access(folder, os.W_OK):
        return f"user {os.getuid()} cannot write {folder}"
    return ""


def find_free_port(host: str) -> int:
    """Return a TCP port of `host` that is free now. If another process takes it first, the engine
    ends and the next boot gets others."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def _build_vllm_arguments(config: AgentConfig, boot: Boot, base: Mapping[str, str]) -> list[str]:
    for option, variable, reason in _REFUSED:
        is_given = option and get_option(config.engine_args, option) is not None
        if is_given or (variable and base.get(variable)):
            names = " and ".join(filter(None, (option, variable)))
            raise LaunchError(f"remove {names}: {reason}")
    arguments = [
        "--tensor-parallel-size", str(config.tensor_parallel_size),
        "--pipeline-parallel-size", str(config.pipeline_parallel_size),
        # Prompts never reach a log, and the agent's probes would fill it.
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        # Requests name URLs, which vLLM fetches from inside the cluster. Without a list it allows
        # all hosts, and with an empty one as well.
        "--allowed-media-domains", *(config.media_domains or (_NO_DOMAIN,)),
    ]  # fmt: skip
    if config.expert_parallel:
        arguments.append("--enable-expert-parallel")
    if boot.meeting_point:
        arguments += [
            "--data-parallel-size", str(config.data_parallel_size),
            # Makes vLLM leave the choice of a rank to its clients (external load balancing).
            "--data-parallel-rank", str(config.data_parallel_rank),
            "--data-parallel-address", boot.meeting_point.host,
            "--data-parallel-rpc-port", str(boot.meeting_point.port),
        ]  # fmt: skip
    if boot.gpu:
        return arguments if has_nvcc(base) else [*arguments, *_ARGUMENTS_WITHOUT_NVCC]
    if config.pipeline_parallel_size > 1:
        # Eager, but with the warm-up: without it vLLM 0.32 on CPU has no buffers between stages and
        # fails with an assertion at the first request.
        return [*arguments, "--compilation-config", '{"mode": 1, "backend": "eager"}']
    # Compilation takes half a minute more on CPU and gains nothing for models that fit there.
    return [*arguments, "--enforce-eager"]


def _set_commits(arguments: Sequence[str], weights: Weights) -> list[str]:
    """The arguments with the commits that were found, in place of branches that may move."""
    pinned = list(arguments)
    for option, commit in weights.pins.items():
        pinned = [*remove_option(pinned, option), option, commit]
    return pinned


def _build_scheduler_arguments(config: AgentConfig, boot: Boot) -> list[str]:
    if boot.scheduling_page is None:
        return []
    if get_option(config.engine_args, _SCHEDULER) is not None:
        raise LaunchError(f"{_SCHEDULER} and --scheduling exclude each other; remove one")
    return [_SCHEDULER, "cleave_worker.vllm.scheduler.make_scheduler"]


def _build_kv_transfer_config(
    config: AgentConfig, boot: Boot, user_settings: Mapping[str, object]
) -> dict[str, object]:
    settings: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if config.engine == "vllm" and not boot.gpu:
        settings["kv_buffer_device"] = "cpu"
    if config.connector == "cleave" and "kv_connector" not in user_settings:
        settings |= _CLEAVE_CONNECTOR
        ports = {"port": boot.kv_port, "prefix_port": boot.prefix_port}
        extra: dict[str, object] = {"host": config.host, **ports}
        if granularity := OVERLAPPED_TRANSFERS.get(config.transfer):
            extra["granularity"] = granularity
        user_extra = user_settings.get(_EXTRA_CONFIG)
        extra |= user_extra if isinstance(user_extra, dict) else {}
        user_settings = {**user_settings, _EXTRA_CONFIG: extra}
    settings |= user_settings
    offloaded_gib = get_option(config.engine_args, _KV_OFFLOADING)
    if config.engine == "vllm" and offloaded_gib is not None:
        settings = _add_offloading(settings, int(offloaded_gib), boot)
    return {**settings, "engine_id": boot.boot_id.removesuffix(_get_rank_suffix(config))}


def _add_offloading(settings: dict[str, object], gib: int, boot: Boot) -> dict[str, object]:
    """The settings with vLLM's OffloadingConnector beside the connector that they name.

    vLLM 0.32 would put it in that one's place. MultiConnector looks at its connectors in order, so
    a handoff counts before what is in host memory. Raises LaunchError.
    """
    if not boot.gpu:
        raise LaunchError(
            f"{_KV_OFFLOADING} {gib}: vLLM keeps copies of KV in host memory for GPUs only; "
            "remove spec.engine.kvOffloadingGib"
        )
    names = ("kv_connector", "kv_connector_module_path", _EXTRA_CONFIG)
    common = {name: value for name, value in settings.items() if name not in names}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "cleave_worker.vllm.kv.offloading_connector",
        "kv_role": "kv_both",
        _EXTRA_CONFIG: {"cpu_bytes_to_use": gib << 30},
    }
    connectors = {"connectors": [settings, offloading]}
    return {**common, "kv_connector": "MultiConnector", _EXTRA_CONFIG: connectors}


def _get_rank_suffix(config: AgentConfig) -> str:
    is_rank = config.engine == "vllm" and config.data_parallel_size > 1
    return f"_dp{_get_vllm_rank(config)}" if is_rank else ""


def _get_vllm_rank(config: AgentConfig) -> int:
    """The data-parallel rank that vLLM knows of; emulated engines do not."""
    return config.data_parallel_rank if config.engine == "vllm" else 0


def _build_environment(config: AgentConfig, boot: Boot, base: Mapping[str, str]) -> dict[str, str]:
    own = {
        LOAD_PAGE_ENV: str(boot.load_page),
        ENGINE_KEY_ENV: boot.engine_key,
        WEIGHTS_ENV: boot.weights.id,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": config.host,
        # vLLM adds the data-parallel rank.
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(boot.kv_port - _get_vllm_rank(config)),
        "PYTHONUNBUFFERED": "1",
        # A redirect would lead past the list of allowed hosts.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        # vLLM's own limit of an engine's start is 600 s.
        "VLLM_ENGINE_READY_TIMEOUT_S": base.get(
            "VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(config.timing.start_timeout))
        ),
        # vLLM's value against a leak in UCX. Plug-ins import NIXL before vLLM can set it.
        "UCX_RCACHE_MAX_UNRELEASED": base.get("UCX_RCACHE_MAX_UNRELEASED", "1024"),
    }
    # Unless DO_NOT_TRACK is 0, nothing is sent to the makers of vLLM and other libraries.
    choice = base.get(_DO_NOT_TRACK, "1")
    own |= {name: base.get(name, choice) for name in (_DO_NOT_TRACK, *_TELEMETRY_SWITCHES)}
    # The token and the accounts are the agent's own.
    hidden = {TOKEN_ENV, CALLERS_ENV, PEERS_ENV, GANG_KEY_ENV}
    inherited = {name: base[name] for name in base.keys() - hidden}
    env = inherited | own
    if boot.scheduling_page is not None:
        env[SCHEDULING_PAGE_ENV] = str(boot.scheduling_page)
    if can_load_adapters(config):
        # Adds paths to the engine's API, for which `access.engine_access` always asks for the key.
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.engine == "emulated":
        # It calls nothing over TLS, and aiohttp reads all certificates: a seventh of its start.
        env["SSL_CERT_FILE"] = os.devnull
    if config.engine == "vllm" and boot.gpu and not has_nvcc(base):
        env |= {name: base.get(name, value) for name, value in _ENV_WITHOUT_NVCC.items()}
        folders = (base.get("LD_LIBRARY_PATH"), *_find_nvrtc_folders())
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    if config.engine == "vllm" and not boot.gpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = base.get("VLLM_CPU_KVCACHE_SPACE", "1")
        if boot.cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = build_omp_binding(boot.cores, config.num_ranks)
        if len(boot.cores) == config.num_ranks == 1 and "LD_PRELOAD" not in base:
            # As vLLM sets them for its worker. `cleave_worker.vllm.process_start` then forks it.
            env |= {"LD_PRELOAD": ":".join(_find_worker_libraries()), "OMP_NUM_THREADS": "1"}
    return env


def _find_nvrtc_folders() -> list[str]:
    """Return the folders of CUDA's wheels with the parts of its run-time compiler NVRTC.

    Humming, vLLM's first choice for FP4 weights on Hopper, runs NVRTC in a process of its own,
    which finds them by the loader's path only; without them the engine ends at its start.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = map(Path, spec.submodule_search_locations or ()) if spec else ()
    files = (file for root in roots for file in root.glob("*/lib/libnvrtc-builtins.so*"))
    return sorted({str(file.parent) for file in files})


def _find_worker_libraries() -> list[str]:
    """Return the libraries that vLLM 0.32 preloads into its CPU workers, as far as installed."""
    found: list[Path] = []
    for package, pattern in (("vllm", "libs/libtcmalloc*.so*"), ("torch", "lib/libgomp*.so*")):
        if (spec := importlib.util.find_spec(package)) and spec.origin:
            found += sorted(Path(spec.origin).parent.glob(pattern))[:1]
    return list(map(str, found))


def _extract_kv_transfer_config(config: AgentConfig) -> tuple[list[str], dict[str, object]]:
    """Separate the KV transfer settings, which are merged with those of the agent. For vLLM, host
    memory is one of them."""
    remaining = list(config.engine_args)
    offloaded_gib = get_option(remaining, _KV_OFFLOADING)
    if config.engine == "vllm" and offloaded_gib is not None:
        remaining = remove_option(remaining, _KV_OFFLOADING)
    text = get_option(remaining, _KV_TRANSFER)
    if text is None:
        return remaining, {}
    try:
        settings = json.loads(text)
    except ValueError:
        raise LaunchError(f"{_KV_TRANSFER} is not JSON") from None
    if not isinstance(settings, dict):
        raise LaunchError(f"{_KV_TRANSFER} is not a JSON object")
    return remove_option(remaining, _KV_TRANSFER), settings
