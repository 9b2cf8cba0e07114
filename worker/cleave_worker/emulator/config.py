"""Configuration of one emulated engine: limits, KV transfer, speed. Built by the command line."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from cleave.perf.model.model_shape import ModelShape
from cleave.perf.named_profiles import NamedProfile
from cleave_worker.emulator.scheduler import EngineLimits

_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_POLICIES = ("fail", "recompute")


class EmulatorConfigError(ValueError):
    """The engine cannot be started with these arguments; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """The emulated part of vLLM's --kv-transfer-config, and the network's speed."""

    engine_id: str
    host: str
    port: int
    lease_s: float = 30.0
    """Blocks of a finished prefill are leased this long, and longer while heartbeats arrive."""
    recompute_on_failure: bool = False
    bandwidth_gbps: float = 200.0
    """Gigabits per second of one transfer; concurrent transfers do not share it."""
    latency_ms: float = 1.0


@dataclass(frozen=True, slots=True)
class EmulatedEngineConfig:
    """All settings of the engine; it reads nothing else from the environment."""

    served_model_name: str
    shape: ModelShape
    profile: NamedProfile
    max_model_len: int
    limits: EngineLimits
    block_size: int
    num_blocks: int
    time_scale: float = 1.0
    """Emulated durations are multiplied by this; 0.1 is ten times faster."""
    kv_transfer: KvTransferConfig | None = None
    adapters: tuple[str, ...] = ()
    """LoRA adapters by name; each continues a prompt in its own way."""
    loads_adapters: bool = False
    """Whether further ones are loaded at run time, as vLLM allows by an environment variable."""
    host_blocks: int = 0
    """Blocks of KV that host memory has room for; 0: there is none."""
    host_token_ms: float = 0.0
    """ms to copy one token back from there."""
    weights: str = ""
    """Digest of the files of the model, from the agent: KV and tokens depend on it."""
    shows_prompt_details: bool = False
    """Whether usage says how many prompt tokens were cached."""

    def __post_init__(self) -> None:
        """Reject limits that could never serve a request, as vLLM does at start-up."""
        capacity = self.num_blocks * self.block_size
        if self.max_model_len > capacity:
            raise EmulatorConfigError(
                f"one request of --max-model-len {self.max_model_len} tokens does not fit the KV "
                f"cache of {capacity} tokens; lower it or raise --num-gpu-blocks-override"
            )
        limits = self.limits
        smallest = min(self.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens)
        if smallest < 1 or self.time_scale < 0:
            fault = "lengths and limits must be at least 1, --time-scale at least 0"
            raise EmulatorConfigError(fault)


def parse_adapters(modules: Sequence[str], enabled: bool) -> tuple[str, ...]:
    """Return names in --lora-modules: NAME=PATH or JSON with `name`. Raises EmulatorConfigError."""
    if modules and not enabled:
        raise EmulatorConfigError("--lora-modules needs --enable-lora")
    names: list[str] = []
    for module in modules:
        try:
            name = json.loads(module)["name"] if module.startswith("{") else module.split("=")[0]
        except (ValueError, KeyError) as error:
            fault = f"--lora-modules: {module!r} is malformed: {error!r}"
            raise EmulatorConfigError(fault) from error
        if not isinstance(name, str) or not name or name in names:
            raise EmulatorConfigError(f"--lora-modules: {module!r} must have a unique name")
        names.append(name)
    return tuple(names)


def parse_kv_transfer(
    text: str, host: str, port: int, bandwidth_gbps: float, latency_ms: float
) -> KvTransferConfig:
    """Parse vLLM's --kv-transfer-config. Raises EmulatorConfigError for what is not emulated."""
    try:
        config = json.loads(text)
        connector, role = config["kv_connector"], config["kv_role"]
        policy = config.get("kv_load_failure_policy", "fail")
        extra = config.get("kv_connector_extra_config") or {}
        lease_s = float(extra.get("kv_lease_duration", 30))
        engine_id = str(config.get("engine_id") or uuid.uuid4())
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise EmulatorConfigError(f"--kv-transfer-config is malformed: {error!r}") from error
    if connector != "NixlConnector" or role not in _ROLES or policy not in _POLICIES:
        raise EmulatorConfigError(
            f"--kv-transfer-config: emulated are NixlConnector with {', '.join(_ROLES)} and "
            f"kv_load_failure_policy {' or '.join(_POLICIES)}"
        )
    if bandwidth_gbps <= 0 or latency_ms < 0 or lease_s <= 0:
        raise EmulatorConfigError("KV bandwidth and lease must be above 0, latency at least 0")
    return KvTransferConfig(
        engine_id, host, port, lease_s, policy == "recompute", bandwidth_gbps, latency_ms
    )
