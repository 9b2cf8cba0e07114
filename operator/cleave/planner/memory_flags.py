"""Engine arguments that change how much memory an engine takes or how it is divided. Pure.

Called for the planner's problem. Each one is counted here, refused by
name, or listed in `left_out`; a test goes through vLLM's settings of caches and offloading.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from cleave.api.deployment import LLMDeploymentSpec
from cleave.api.engine import DeploymentEngine, EngineSpec
from cleave.api.role import Role
from cleave.perf.hardware.memory import NCCL_RESERVE, VLLM_RESERVE, MemoryReserve
from cleave.planner.placement import PlanError

SEQS, BATCHED_TOKENS, BLOCK_SIZE = "--max-num-seqs", "--max-num-batched-tokens", "--block-size"
_SHARES = ("--gpu-memory-utilization", "--device-memory-utilization")
_KV_BYTES = "--kv-cache-memory-bytes"
EAGER = "--enforce-eager"
COUNTED = (*_SHARES, _KV_BYTES, EAGER, SEQS, BATCHED_TOKENS, BLOCK_SIZE)
"""What `build_reserve` and `problem.build_policies` read; `describe` and `left_out` say what plans
do not make of it."""
_CONFIG = "put a config.json with these values into spec.model.config as well"
_WITHOUT = "remove it, or set the instances in spec.placement.manual without a prediction"
REFUSED = {
    "--num-gpu-blocks-override": f"set {_KV_BYTES} instead",
    "--cpu-offload-gb": _WITHOUT,
    "--cpu-offload-params": _WITHOUT,
    "--offload-backend": _WITHOUT,
    "--offload-group-size": _WITHOUT,
    "--offload-num-in-group": _WITHOUT,
    "--offload-params": _WITHOUT,
    "--offload-prefetch-step": _WITHOUT,
    "--decode-context-parallel-size": _WITHOUT,
    "--hf-overrides": _CONFIG,
    "--hf-config-path": _CONFIG,
    "--quantization-config": _CONFIG,
    "--kv-cache-dtype-skip-layers": _WITHOUT,
    "--mamba-cache-dtype": _WITHOUT,
    "--mamba-ssm-cache-dtype": _CONFIG,
    "--mamba-cache-mode": _WITHOUT,
    "--disable-sliding-window": _WITHOUT,
    "--disable-hybrid-kv-cache-manager": _WITHOUT,
    "--spec-method": "write --speculative-config with all of them",
    "--spec-model": "write --speculative-config with all of them",
    "--spec-tokens": "write --speculative-config with all of them",
}
"""Arguments with other sizes than those that are planned for, and what to do."""
_NEUTRAL = {"--cpu-offload-gb": "0", "--decode-context-parallel-size": "1"}
"""Values with which they change nothing."""
_SHAPE_FLAGS = ("--quantization", "--kv-cache-dtype")
_UNITS = {
    letter: base**power
    for power, pair in enumerate(("kK", "mM", "gG", "tT"), start=1)
    for letter, base in zip(pair, (1000, 1024), strict=True)
}
"""vLLM's: small letters are decimal."""


def check_args(spec: LLMDeploymentSpec) -> None:
    """Raise PlanError with a line for each argument with sizes that no plan counts."""
    engine = spec.engine
    # Each is the begin of another flag, for which it must not be taken.
    others = [arg for arg in engine.args if arg.split("=")[0].replace("_", "-") not in _SHAPE_FLAGS]
    given = engine.model_copy(update={"args": others})
    faults = [
        f"spec.engine.args: {flag}: no plan counts with it; {remedy}"
        for flag, remedy in REFUSED.items()
        if given.has_flag(flag)
        and given.get_flag_value(flag) != _NEUTRAL.get(flag, "")
        and (remedy != _CONFIG or spec.model.config is None)
    ]
    if faults:
        raise PlanError(faults)


def build_shared_reserve(engine: DeploymentEngine) -> MemoryReserve:
    """The memory that engines of any role keep: the most of each kind. Raises PlanError."""
    if engine.roles is None:
        return build_reserve(engine)
    reserves = [build_reserve(engine.for_role(role)) for role in Role]
    return replace(
        reserves[0],
        utilisation=min(each.utilisation for each in reserves),
        graphs_gib=max(each.graphs_gib for each in reserves),
        kv_bytes=min((each.kv_bytes for each in reserves if each.kv_bytes), default=None),
        max_num_seqs=max(each.max_num_seqs for each in reserves),
        max_num_batched_tokens=max(each.max_num_batched_tokens for each in reserves),
    )


def build_reserve(engine: EngineSpec) -> MemoryReserve:
    """The memory that engines with these arguments keep. Raises PlanError."""
    reserve = NCCL_RESERVE if engine.uses_nccl else VLLM_RESERVE
    shares = [share for flag in _SHARES if (share := _read_share(engine, flag)) is not None]
    return replace(
        reserve,
        utilisation=shares[-1] if shares else reserve.utilisation,
        graphs_gib=0.0 if engine.has_flag(EAGER) else reserve.graphs_gib,
        kv_bytes=read_count(engine, _KV_BYTES),
        max_num_seqs=read_count(engine, SEQS) or reserve.max_num_seqs,
        max_num_batched_tokens=read_count(engine, BATCHED_TOKENS) or reserve.max_num_batched_tokens,
        block_tokens=read_count(engine, BLOCK_SIZE) or reserve.block_tokens,
    )


def describe(engine: DeploymentEngine) -> Iterator[str]:
    """A sentence about the arguments of memory that plans count, and one about those of roles."""
    flags = (*_SHARES, _KV_BYTES)
    given = [f"{flag} {engine.get_flag_value(flag)}" for flag in flags if engine.has_flag(flag)]
    if given:
        yield f"spec.engine.args: the plan counts with {', '.join(given)}"
    own = [
        f"{flag} {value} of {role}"
        for role in Role
        for flag in flags
        if (value := engine.for_role(role).get_flag_value(flag)) != engine.get_flag_value(flag)
    ]
    if own:
        least = f"all roles are planned with the least memory that one has ({', '.join(own)})"
        yield f"spec.engine.roles: {least}; engines of the others have more KV than planned"


def read_count(engine: EngineSpec, flag: str) -> int | None:
    """The whole number that the flag has in `args`, as vLLM reads it (`8k`, `25.6G`); None: it is
    not there. Raises PlanError."""
    value = engine.get_flag_value(flag)
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", value.strip())
    count = int(float(match[1]) * _UNITS.get(match[2], 1)) if match else 0
    if count < 1:
        fault = f"spec.engine.args: {flag} {value}: must be a whole number above 0, such as 256"
        raise PlanError([fault])
    return count


def _read_share(engine: EngineSpec, flag: str) -> float | None:
    value = engine.get_flag_value(flag)
    if value is None:
        return None
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        fault = f"spec.engine.args: {flag} {value}: must be above 0 and at most 1, such as 0.9"
        raise PlanError([fault])
    return share
