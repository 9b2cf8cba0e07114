"""What a deployment configures and the planner does not simulate, in one line.

Called for the problem's notes, so every plan says it, and by `cleave simulate`. Everything else of
routing, pools and engine scheduling that changes latencies is in `problem.Policies`; a test goes
through the fields of the API and fails for one that is in neither.
"""

from collections.abc import Iterator, Sequence

from cleave.api.deployment import LLMDeploymentSpec, Routing
from cleave.api.engine import EngineSpec, RoleEngine, TransferMode
from cleave.api.enums import DispatchPolicy, LateRequestPolicy
from cleave.api.role import Role
from cleave.api.scheduling import DecodeAdmission
from cleave.planner import memory_flags

UNCOUNTED = (
    "--compilation-config", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size",
    "--optimization-level", "--performance-mode", "--enable-lora", "--max-loras",
    "--max-lora-rank", "--limit-mm-per-prompt", "--language-model-only", "--skip-mm-profiling",
    "--mm-ipc-gpu-memory-gb", "--enable-dbo", "--ubatch-size", "--enable-eplb", "--eplb-config",
    "--mamba-block-size", "--use-replayssm", "--replayssm-buffer-len", "--swa-bounded-replay",
    "--kv-sharing-fast-prefill", "--enable-mamba-shared-prefix-checkpoint", "--max-num-active-seqs",
    "--max-num-scheduled-tokens", "--prefix-match-unit",
)  # fmt: skip
"""Engine arguments that change memory or times by less than plans are wrong, or by what only an
engine measures; `memory_flags` has the others."""
_PROMPT_LIMIT = "--long-prefill-token-threshold"
_PREDICTING = {DispatchPolicy.LEAST_HEAVY, DispatchPolicy.BEST_FIT}
"""Policies that compare predicted output lengths."""
_EAGER_TIMES = (
    "longer iterations without CUDA graphs ({} --enforce-eager), unless a profile has them"
)
_OWN_LIMITS = "your limits of iterations (scheduling.limits)"


def describe(spec: LLMDeploymentSpec) -> str | None:
    """One line that names what plans for `spec` do not simulate; None: there is nothing."""
    parts = [*_list_routing(spec), *_list_engine(spec.engine)]
    if _has_limits(spec.engine):
        parts.append(f"{_OWN_LIMITS}; the search chooses its own")
    return _join(parts)


def describe_manual(spec: LLMDeploymentSpec) -> str | None:
    """The same for a simulation of a manual placement."""
    parts = [*_list_routing(spec), *_list_engine(spec.engine)]
    if _has_limits(spec.engine):
        parts.append(_OWN_LIMITS)
    return _join(parts)


def _join(parts: Sequence[str]) -> str | None:
    return f"not simulated: {'; '.join(parts)}" if parts else None


def _list_routing(spec: LLMDeploymentSpec) -> Iterator[str]:
    routing, gateway = spec.routing, spec.gateway
    if routing.session_header is not None:
        yield "sessions that stay on an instance (routing.sessionHeader)"
    if routing.late is not LateRequestPolicy.SERVE:
        yield f"late requests (routing.late {routing.late}); all are served"
    if routing.queue_limit < Routing().queue_limit:
        yield f"the limit of waiting requests (routing.queueLimit {routing.queue_limit})"
    if routing.policy in _PREDICTING:
        yield f"errors of predicted output lengths (routing.policy {routing.policy})"
    is_eager = spec.engine.has_flag(memory_flags.EAGER)
    for role in Role:
        path = f"engine.roles.{role}.args"
        if flags := _list_own_flags(spec.engine.get_role(role)):
            yield f"{path} {', '.join(flags)}"
        if spec.engine.for_role(role).has_flag(memory_flags.EAGER) and not is_eager:
            yield _EAGER_TIMES.format(path)
    if (routers := gateway.replicas * gateway.processes) > 1:
        yield f"that {routers} gateway processes in a cluster see parts of the traffic"


def _list_engine(engine: EngineSpec) -> Iterator[str]:
    if engine.transfer is not TransferMode.PULL:
        yield f"KV sent during the prefill (engine.transfer {engine.transfer}); all is pulled"
    if flags := [flag for flag in (_PROMPT_LIMIT, *UNCOUNTED) if engine.has_flag(flag)]:
        yield f"engine.args {', '.join(flags)}"
    if engine.has_flag(memory_flags.EAGER):
        yield _EAGER_TIMES.format("engine.args")
    scheduling = engine.scheduling
    if scheduling is not None:
        if scheduling.long_prompt_tokens is not None:
            yield "the limit of long prompts (scheduling.longPromptTokens)"
        if scheduling.preemption_limit is not None:
            yield "the limit of preemptions (scheduling.preemptionLimit)"
        if scheduling.admission is not DecodeAdmission.GREEDY:
            admission = f"scheduling.admission {scheduling.admission}"
            yield f"errors of predicted output lengths ({admission})"


def _list_own_flags(own: RoleEngine) -> list[str]:
    """Flags of one role but those that plans count."""
    flags = (arg.split("=")[0] for arg in own.args if arg.startswith("--"))
    return [flag for flag in flags if flag.replace("_", "-") not in memory_flags.COUNTED]


def _has_limits(engine: EngineSpec) -> bool:
    return engine.scheduling is not None and bool(engine.scheduling.limits)
