"""Command line of the emulated engine: `python -m cleave_worker.emulator.main` with vLLM's flags.

The agent starts it instead of `cleave_worker.vllm.api_server`. Flags of vLLM without a meaning
here are accepted where the agent or its users pass them; all others are rejected.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from cleave.perf import named_profiles
from cleave.perf.hardware.link import build_host_link
from cleave.perf.model import hf_config, known_models, model_report, model_shape
from cleave.perf.model.model_report import EngineFacts, GroupFacts, HostMemoryFacts
from cleave.rpc.revision import WEIGHTS_ENV
from cleave.shm import load_page
from cleave_worker.access.engine_access import read_access
from cleave_worker.emulator import config
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.config import EmulatedEngineConfig, EmulatorConfigError
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits
from cleave_worker.scheduling import config_page

_RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_DEFAULT_SHAPE = "opt-13b"
_KEEPALIVE_S = 5.0
"""uvicorn's keep-alive time, as in vLLM: clients must handle connections that close after it."""
_SHUTDOWN_S = 0.01
"""Open requests are cut off, as by a terminated vLLM; aiohttp reads 0 as no limit."""


class EmulatorParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"emulated engine: {message}\n")


@dataclass(frozen=True, slots=True)
class EmulatorOptions:
    """A parsed command line."""

    host: str
    port: int
    fault_injection: bool
    engine: EmulatedEngineConfig
    model_config: Mapping[str, object] | None
    """The model's config.json; None: a name that is not known, which stands for any model."""


def parse(argv: Sequence[str], environment: dict[str, str]) -> EmulatorOptions:
    """Parse the command line. Raises EmulatorConfigError; exits for errors that argparse finds."""
    args = build_parser().parse_args(argv)
    shape = _load_shape(args.model, args.dtype)
    profile = _load_profile(args.latency, shape.name, args.tensor_parallel_size)
    if args.block_size < 1:
        raise EmulatorConfigError("--block-size must be at least 1")
    if args.kv_offloading_size < 0:
        raise EmulatorConfigError("--kv-offloading-size must be at least 0")
    engine = EmulatedEngineConfig(
        served_model_name=args.served_model_name or args.model,
        shape=shape,
        profile=profile,
        max_model_len=args.max_model_len or shape.max_model_len,
        limits=EngineLimits(
            args.max_num_seqs, args.max_num_batched_tokens, args.enable_prefix_caching
        ),
        block_size=args.block_size,
        num_blocks=args.num_gpu_blocks_override or profile.kv_capacity_tokens // args.block_size,
        time_scale=args.time_scale,
        kv_transfer=_load_kv_transfer(args, environment),
        adapters=config.parse_adapters(args.lora_modules, args.enable_lora),
        loads_adapters=args.enable_lora and environment.get(_RUNTIME_LORA) == "1",
        host_blocks=(args.kv_offloading_size << 30) // (args.block_size * shape.kv_bytes_per_token),
        host_token_ms=args.time_scale
        * _compute_host_token_ms(shape.kv_bytes_per_token / args.tensor_parallel_size),
        weights=environment.get(WEIGHTS_ENV, ""),
        shows_prompt_details=args.enable_prompt_tokens_details,
    )
    return EmulatorOptions(
        args.host, args.port, args.fault_injection, engine, _find_config(args.model)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return 0 then, 2 for a rejected command line."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv, dict(os.environ))
    except EmulatorConfigError as error:
        sys.stderr.write(f"emulated engine: {error}\n")
        return 2
    try:
        asyncio.run(_serve(options, _get_page_path(load_page.ENV), _get_page_path(config_page.ENV)))
    except OSError as error:
        sys.stderr.write(f"emulated engine: {error}\n")
        return 1
    return 0


def _get_page_path(variable: str) -> Path | None:
    path = os.environ.get(variable)
    return Path(path) if path else None


async def _serve(options: EmulatorOptions, load: Path | None, scheduling: Path | None) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    engine = EmulatedEngine(options.engine, load, scheduling)
    if load is not None and options.model_config is not None:
        model_report.write(load, _build_facts(options.engine, options.model_config))
    runner = web.AppRunner(
        EmulatorApi(engine, options.fault_injection, read_access(os.environ)).build_application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        await engine.start()
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
        host, port = runner.addresses[0][:2]
        sys.stderr.write(f"emulated engine: http://{host}:{port}\n")
        await ended.wait()
    finally:
        await engine.stop()
        await runner.cleanup()


def _load_shape(name: str, dtype: str) -> model_shape.ModelShape:
    try:
        return model_shape.load_shape(name, dtype)
    except model_shape.UnknownModelError as error:
        if Path(name).is_dir():
            raise EmulatorConfigError(str(error)) from error
        # An unknown model name is accepted; its KV is as large as the default model's.
        return model_shape.load_shape(_DEFAULT_SHAPE, dtype)


def _find_config(name: str) -> Mapping[str, object] | None:
    """The config.json of a folder that has been read as the engine's model, or of a known model."""
    if Path(name).is_dir():
        config = hf_config.decode_config((Path(name) / "config.json").read_text(encoding="utf-8"))
        return config if isinstance(config, Mapping) else None
    known = known_models.find_config(name)
    return known[1] if known else None


def _build_facts(engine: EmulatedEngineConfig, config: Mapping[str, object]) -> EngineFacts:
    """What vLLM would report, with one group for all layers that keep KV."""
    shape = engine.shape
    group = GroupFacts(
        "emulated", shape.attention_layers, engine.block_size, shape.kv_bytes_per_token
    )
    # An emulated engine is not distributed, at any parallel sizes.
    host = HostMemoryFacts(engine.host_blocks * engine.block_size, engine.host_token_ms)
    sizes = engine.max_model_len, engine.block_size
    return EngineFacts(config, *sizes, "", "auto", 1, 1, [group], host)


def _compute_host_token_ms(gpu_bytes: float) -> float:
    """ms to copy a token of which each GPU has `gpu_bytes` over PCIe of the usual rate."""
    return gpu_bytes / (build_host_link(None).effective_gb_per_s * 1e6)


def _load_profile(name: str | None, shape: str, ranks: int) -> named_profiles.NamedProfile:
    measured = any(profile.split("/")[1] == shape for profile in named_profiles.list_names())
    default = f"distserve/{shape if measured else _DEFAULT_SHAPE}/tp{ranks}"
    try:
        return named_profiles.load_profile(name or default)
    except named_profiles.UnknownProfileError as error:
        raise EmulatorConfigError(str(error)) from error


def _load_kv_transfer(
    args: argparse.Namespace, environment: dict[str, str]
) -> config.KvTransferConfig | None:
    if args.kv_transfer_config is None:
        return None
    host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
    port = environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    if not port.isdigit():
        raise EmulatorConfigError(f"VLLM_NIXL_SIDE_CHANNEL_PORT={port} is not a port")
    return config.parse_kv_transfer(
        args.kv_transfer_config, host, int(port), args.kv_bandwidth_gbps, args.kv_latency_ms
    )


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, which scripts/engine_flags.py also reads."""
    parser = EmulatorParser(
        prog="cleave_worker.emulator.main", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="folder with a config.json, or a name")
    add("--served-model-name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--dtype", default="auto", choices=model_shape.DTYPES)
    add("--max-model-len", type=int)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--block-size", type=int, default=16)
    add("--num-gpu-blocks-override", type=int)
    add("--tensor-parallel-size", type=int, default=1)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--kv-transfer-config", help="vLLM's JSON; without it there is no KV handoff")
    add("--kv-offloading-size", type=int, default=0, metavar="GIB", help="memory for copies of KV")
    add("--enable-prompt-tokens-details", action="store_true", help="usage has cached tokens")
    add("--enable-lora", action="store_true")
    add("--lora-modules", nargs="+", default=(), metavar="NAME=PATH", help="PATH is not read")
    add = parser.add_argument_group("emulation").add_argument
    add("--latency", help="latency profile: ENGINE/MODEL/tpN, or a file of cleave profile")
    add("--time-scale", type=float, default=1.0, help="0.1 is ten times faster")
    add("--kv-bandwidth-gbps", type=float, default=200.0, help="gigabits per second")
    add("--kv-latency-ms", type=float, default=1.0)
    add("--fault-injection", action="store_true", help="open /emulator/faults")
    _accept_without_effect(parser.add_argument_group("vLLM's, without effect here").add_argument)
    return parser


def _accept_without_effect(add: Callable[..., argparse.Action]) -> None:
    for flag in ("--seed", "--gpu-memory-utilization", "--uvicorn-log-level"):
        add(flag)
    for number in ("--pipeline-parallel-size", "--max-loras", "--max-cpu-loras", "--max-lora-rank"):
        add(number, type=int)
    for switch in ("--enforce-eager", "--trust-remote-code", "--enable-log-requests"):
        add(switch, action=argparse.BooleanOptionalAction)
    for switch in ("--disable-log-stats", "--disable-uvicorn-access-log"):
        add(switch, action="store_true")


if __name__ == "__main__":
    sys.exit(main())
