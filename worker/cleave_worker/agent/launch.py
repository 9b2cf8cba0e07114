"""How an engine is started: arguments and environment of one boot.

A pure function of the agent's config and of what this boot was given (ports, cores, load page);
called by the supervisor at every start. What is hard: the boot id is also the engine id of the KV
transfer, so that a hand-off of an earlier boot can never be mistaken for one of this boot.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.metrics.load_page import ENV as LOAD_PAGE_ENV
from cleave_worker.agent.config import PACES, AgentConfig
from cleave_worker.agent.cores import omp_binding
from cleave_worker.scheduling.terms_page import ENV as TERMS_PAGE_ENV

_KV_TRANSFER = "--kv-transfer-config"
_EXTRA = "kv_connector_extra_config"
_OWN_CONNECTOR = {
    "kv_connector": "CleaveConnector",
    "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
    "kv_load_failure_policy": "recompute",
}
_CHECKPOINTS = {
    "kv_connector": "CheckpointedConnector",
    "kv_connector_module_path": "cleave_worker.vllm.kv.checkpointed",
}
"""In its place where the settings have `checkpoints`."""
_SCHEDULER = "--scheduler-cls"
_ENV_WITHOUT_NVCC = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
_ARGUMENTS_WITHOUT_NVCC = ("--gdn-prefill-backend", "triton")
"""vLLM 0.32 chooses FlashInfer and DeepGEMM on Hopper and later by default. Both compile their
kernels with nvcc, which CUDA's wheels do not bring, and without it the engine ends in its warm-up.
The rest of FlashInfer is left out by `cleave_worker.vllm.kernels`."""


class LaunchError(ValueError):
    """The engine's arguments contradict what the agent must set."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What one start of the engine was given."""

    boot_id: str
    engine_port: int
    kv_port: int
    load_page: Path
    terms_page: Path | None = None
    """None: no terms are stated for any role."""
    cores: tuple[int, ...] = ()
    """Empty: not pinned."""
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def launch(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """The engine's process. Raises LaunchError, CoresError."""
    given, kv_transfer = _take_kv_transfer(config.engine_args)
    arguments = [
        "--host", config.host,
        "--port", str(boot.engine_port),
        "--model", config.model,
        "--served-model-name", config.served_model_name,
        _KV_TRANSFER, json.dumps(_kv_transfer(config, boot, kv_transfer)),
    ]  # fmt: skip
    if config.max_model_len:
        arguments += ["--max-model-len", str(config.max_model_len)]
    if config.engine == "vllm":
        arguments += _vllm_arguments(config, boot, base_env) + _scheduler(config, boot)
    module = {
        "vllm": "vllm.entrypoints.openai.api_server",
        "emulated": "cleave_worker.emulator.main",
    }[config.engine]
    argv = (sys.executable, "-P", "-m", module, *arguments, *given)
    return Launch(argv, {**base_env, **_environment(config, boot, base_env)})


def share(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """vLLM's process on a further node of an instance; `boot` is the leader's. Raises LaunchError.

    The KV that it holds goes by the leader's engine id: hand-offs name only that.
    """
    given, kv_transfer = _take_kv_transfer(config.engine_args)
    arguments = [
        "--model", config.model,
        _KV_TRANSFER, json.dumps(_kv_transfer(config, boot, kv_transfer)),
    ]  # fmt: skip
    if config.max_model_len:
        arguments += ["--max-model-len", str(config.max_model_len)]
    arguments += _vllm_arguments(config, boot, base_env)
    argv = (sys.executable, "-P", "-m", "cleave_worker.vllm.share", *arguments, *given)
    return Launch(argv, {**base_env, **_environment(config, boot, base_env)})


def block_size(config: AgentConfig, gpu: bool) -> int:
    """Tokens of a KV block as far as the command line tells: --block-size, else the default."""
    told = _option(config.engine_args, "--block-size")
    if told and told.isdigit():
        return int(told)
    return 128 if config.engine == "vllm" and not gpu else 16


def max_adapters(config: AgentConfig) -> int:
    """Adapters that the engine holds at a time, as its command line tells."""
    told = _option(config.engine_args, "--max-loras")
    return int(told) if told and told.isdigit() else 1


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU; asked without loading CUDA or torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def has_nvcc(env: Mapping[str, str]) -> bool:
    """Whether a process with `env` finds nvcc, by the rule of FlashInfer and DeepGEMM."""
    if home := env.get("CUDA_HOME") or env.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc") is not None
    path = env.get("PATH", os.defpath)
    return any(shutil.which(nvcc, path=path) for nvcc in ("nvcc", "/usr/local/cuda/bin/nvcc"))


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now.

    Somebody may take it before the engine does; the engine then ends and the next boot gets others.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _vllm_arguments(config: AgentConfig, boot: Boot, base: Mapping[str, str]) -> list[str]:
    arguments = [
        "--tensor-parallel-size", str(config.tensor_parallel_size),
        "--pipeline-parallel-size", str(config.pipeline_parallel_size),
        # Prompts never reach a log; the agent's probes would fill it.
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if boot.gpu:
        return arguments if has_nvcc(base) else [*arguments, *_ARGUMENTS_WITHOUT_NVCC]
    if config.pipeline_parallel_size > 1:
        # As eager, but with the warm-up: without it vLLM 0.32 on CPU has no buffers between stages
        # and ends with an assertion at the first request.
        return [*arguments, "--compilation-config", '{"mode": 1, "backend": "eager"}']
    # Compiling takes half a minute more on CPU and gains nothing for the models that fit there.
    return [*arguments, "--enforce-eager"]


def _scheduler(config: AgentConfig, boot: Boot) -> list[str]:
    if boot.terms_page is None:
        return []
    if _option(config.engine_args, _SCHEDULER) is not None:
        raise LaunchError(f"{_SCHEDULER} and --scheduling exclude each other; remove one")
    return [_SCHEDULER, "cleave_worker.vllm.scheduler.make_scheduler"]


def _kv_transfer(config: AgentConfig, boot: Boot, given: Mapping[str, object]) -> dict[str, object]:
    settings: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if config.engine == "vllm" and not boot.gpu:
        settings["kv_buffer_device"] = "cpu"
    if config.connector == "cleave":
        settings |= _OWN_CONNECTOR
        own: dict[str, object] = {"host": config.host, "port": boot.kv_port}
        if pace := PACES.get(config.transfer):
            own["pace"] = pace
        stated = given.get(_EXTRA)
        own |= stated if isinstance(stated, dict) else {}
        if "checkpoints" in own:
            settings |= _CHECKPOINTS
        given = {**given, _EXTRA: own}
    return {**settings, **given, "engine_id": boot.boot_id}


def _environment(config: AgentConfig, boot: Boot, base: Mapping[str, str]) -> dict[str, str]:
    env = {
        LOAD_PAGE_ENV: str(boot.load_page),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": config.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(boot.kv_port),
        "PYTHONUNBUFFERED": "1",
    }
    if boot.terms_page is not None:
        env[TERMS_PAGE_ENV] = str(boot.terms_page)
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.engine == "vllm" and boot.gpu and not has_nvcc(base):
        env |= {name: base.get(name, value) for name, value in _ENV_WITHOUT_NVCC.items()}
    if config.engine == "vllm" and not boot.gpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = base.get("VLLM_CPU_KVCACHE_SPACE", "1")
        if boot.cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = omp_binding(boot.cores, config.ranks)
    return env


def _take_kv_transfer(arguments: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Split the user's own KV transfer settings off: they are merged, not passed twice."""
    rest = list(arguments)
    text = _option(rest, _KV_TRANSFER)
    if text is None:
        return rest, {}
    try:
        settings = json.loads(text)
    except ValueError:
        raise LaunchError(f"{_KV_TRANSFER} is not JSON") from None
    if not isinstance(settings, dict):
        raise LaunchError(f"{_KV_TRANSFER} is not a JSON object")
    if f"{_KV_TRANSFER}={text}" in rest:
        rest.remove(f"{_KV_TRANSFER}={text}")
    else:
        at = rest.index(_KV_TRANSFER)
        del rest[at : at + 2]
    return rest, settings


def _option(arguments: Sequence[str], name: str) -> str | None:
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
