"""Builds arguments and environment for one boot of an engine.

Pure functions of the agent's configuration and of what this boot was given (ports, cores, load
page); called by the supervisor at every start. What is hard: the boot id is also the engine id of
the KV transfer, so that a handoff of an earlier boot is never taken for one of this boot.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.shm.load_page import ENV as LOAD_PAGE_ENV
from cleave_worker.agent.config import PACES, AgentConfig
from cleave_worker.agent.cpu_cores import omp_binding
from cleave_worker.scheduling.config_page import ENV as TERMS_PAGE_ENV

_KV_TRANSFER = "--kv-transfer-config"
_EXTRA = "kv_connector_extra_config"
_OWN_CONNECTOR = {
    "kv_connector": "CleaveConnector",
    "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
    "kv_load_failure_policy": "recompute",
}
_CHECKPOINTS = {
    "kv_connector": "CheckpointedConnector",
    "kv_connector_module_path": "cleave_worker.vllm.kv.checkpoint_connector",
}
"""Replaces CleaveConnector where the settings have `checkpoints`."""
_SCHEDULER = "--scheduler-cls"
_ENV_WITHOUT_NVCC = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
_ARGUMENTS_WITHOUT_NVCC = ("--gdn-prefill-backend", "triton")
"""vLLM 0.32 chooses FlashInfer and DeepGEMM on Hopper and later by default. Both compile their
kernels with nvcc, which CUDA's wheels do not contain; without it the engine ends in its warm-up.
`cleave_worker.vllm.flashinfer` disables the rest of FlashInfer."""


class LaunchError(ValueError):
    """The engine's arguments contradict what the agent must set."""


@dataclass(frozen=True, slots=True)
class Boot:
    """What one start of the engine is given."""

    boot_id: str
    engine_port: int
    kv_port: int
    load_page: Path
    terms_page: Path | None = None
    """None: no role has a scheduling configuration."""
    cores: tuple[int, ...] = ()
    """Empty: not pinned."""
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def launch(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """Build the engine's process. Raises LaunchError, CoresError."""
    user_arguments, kv_transfer = _take_kv_transfer(config.engine_args)
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
    argv = (sys.executable, "-P", "-m", module, *arguments, *user_arguments)
    return Launch(argv, {**base_env, **_environment(config, boot, base_env)})


def share(config: AgentConfig, boot: Boot, base_env: Mapping[str, str]) -> Launch:
    """Build vLLM's process on a further node of an instance; `boot` is the leader's.

    Its KV has the leader's engine id, as handoffs name only that. Raises LaunchError.
    """
    user_arguments, kv_transfer = _take_kv_transfer(config.engine_args)
    arguments = [
        "--model", config.model,
        _KV_TRANSFER, json.dumps(_kv_transfer(config, boot, kv_transfer)),
    ]  # fmt: skip
    if config.max_model_len:
        arguments += ["--max-model-len", str(config.max_model_len)]
    arguments += _vllm_arguments(config, boot, base_env)
    argv = (sys.executable, "-P", "-m", "cleave_worker.vllm.headless", *arguments, *user_arguments)
    return Launch(argv, {**base_env, **_environment(config, boot, base_env)})


def block_size(config: AgentConfig, gpu: bool) -> int:
    """Return the tokens per KV block: --block-size, else the engine's default."""
    text = _option(config.engine_args, "--block-size")
    if text and text.isdigit():
        return int(text)
    return 128 if config.engine == "vllm" and not gpu else 16


def max_adapters(config: AgentConfig) -> int:
    """Return the number of adapters that the engine holds at a time."""
    text = _option(config.engine_args, "--max-loras")
    return int(text) if text and text.isdigit() else 1


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, without loading CUDA or torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def has_nvcc(env: Mapping[str, str]) -> bool:
    """Return whether a process with `env` finds nvcc, by the rule of FlashInfer and DeepGEMM."""
    if home := env.get("CUDA_HOME") or env.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc") is not None
    path = env.get("PATH", os.defpath)
    return any(shutil.which(nvcc, path=path) for nvcc in ("nvcc", "/usr/local/cuda/bin/nvcc"))


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free now.

    If another process takes it before the engine does, the engine ends and the next boot gets
    others.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def _vllm_arguments(config: AgentConfig, boot: Boot, base: Mapping[str, str]) -> list[str]:
    arguments = [
        "--tensor-parallel-size", str(config.tensor_parallel_size),
        "--pipeline-parallel-size", str(config.pipeline_parallel_size),
        # Prompts never reach a log, and the agent's probes would fill it.
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    if boot.gpu:
        return arguments if has_nvcc(base) else [*arguments, *_ARGUMENTS_WITHOUT_NVCC]
    if config.pipeline_parallel_size > 1:
        # Eager, but with the warm-up: without it vLLM 0.32 on CPU has no buffers between stages and
        # fails with an assertion at the first request.
        return [*arguments, "--compilation-config", '{"mode": 1, "backend": "eager"}']
    # Compilation takes half a minute more on CPU and gains nothing for models that fit there.
    return [*arguments, "--enforce-eager"]


def _scheduler(config: AgentConfig, boot: Boot) -> list[str]:
    if boot.terms_page is None:
        return []
    if _option(config.engine_args, _SCHEDULER) is not None:
        raise LaunchError(f"{_SCHEDULER} and --scheduling exclude each other; remove one")
    return [_SCHEDULER, "cleave_worker.vllm.scheduler.make_scheduler"]


def _kv_transfer(
    config: AgentConfig, boot: Boot, user_settings: Mapping[str, object]
) -> dict[str, object]:
    settings: dict[str, object] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if config.engine == "vllm" and not boot.gpu:
        settings["kv_buffer_device"] = "cpu"
    if config.connector == "cleave":
        settings |= _OWN_CONNECTOR
        extra: dict[str, object] = {"host": config.host, "port": boot.kv_port}
        if granularity := PACES.get(config.transfer):
            extra["pace"] = granularity
        user_extra = user_settings.get(_EXTRA)
        extra |= user_extra if isinstance(user_extra, dict) else {}
        if "checkpoints" in extra:
            settings |= _CHECKPOINTS
        user_settings = {**user_settings, _EXTRA: extra}
    return {**settings, **user_settings, "engine_id": boot.boot_id}


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
    """Separate the user's KV transfer settings, which are merged with those of the agent."""
    remaining = list(arguments)
    text = _option(remaining, _KV_TRANSFER)
    if text is None:
        return remaining, {}
    try:
        settings = json.loads(text)
    except ValueError:
        raise LaunchError(f"{_KV_TRANSFER} is not JSON") from None
    if not isinstance(settings, dict):
        raise LaunchError(f"{_KV_TRANSFER} is not a JSON object")
    if f"{_KV_TRANSFER}={text}" in remaining:
        remaining.remove(f"{_KV_TRANSFER}={text}")
    else:
        index = remaining.index(_KV_TRANSFER)
        del remaining[index : index + 2]
    return remaining, settings


def _option(arguments: Sequence[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
