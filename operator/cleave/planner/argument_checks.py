"""Checks of engines' command-line arguments against the parsers of the engines. Pure.

Called for deployments and pools, before an image is pulled whose engine would end with them.
"""

from collections.abc import Iterator, Sequence

from cleave.api.engine import DeploymentEngine, EngineSpec
from cleave.api.pods import engine_flags
from cleave.api.role import Role
from cleave.planner.connector_choice import SPECULATION_FLAG, read_speculation

_FIELD = "spec.engine.args"
_MAX_MERGED = 120
"""Most arguments, and variables, of one role; a pool has room for 128 with those that plans add."""
_SHARED = frozenset((
    "--block-size", "--chat-template", "--code-revision", "--config-format", "--convert",
    "--default-chat-template-kwargs", "--disable-hybrid-kv-cache-manager", "--dtype",
    "--enable-lora", "--generation-config", "--hf-config-path", "--hf-overrides",
    "--kv-cache-dtype", "--kv-cache-dtype-skip-layers", "--kv-sharing-fast-prefill",
    "--kv-transfer-config", "--load-format", "--lora-modules", "--mamba-cache-dtype",
    "--mamba-ssm-cache-dtype", "--max-lora-rank", "--model-class-overrides", "--model-impl",
    "--override-generation-config", "--quantization", "--quantization-config",
    "--reasoning-parser", "--revision", "--runner", "--spec-method", "--spec-model",
    SPECULATION_FLAG, "--tokenizer", "--tokenizer-mode",
    "--tokenizer-revision", "--tool-call-parser", "--trust-remote-code",
))  # fmt: skip
"""Flags that decide KV, weights, adapters or answers. Engines that exchange KV, and those that
take over each other's requests, must have the same."""
_DRAFTED = "num_speculative_tokens"
"""Of speculation a role's own: KV is the same with any. (States of linear attention are not; their
engines refuse each other's.)"""
_AUTO_TOOLS, _TOOL_PARSER = "--enable-auto-tool-choice", "--tool-call-parser"
_SCHEDULERS = ("--scheduler-cls", "--scheduling-policy")


def list_argument_faults(engine: EngineSpec) -> Iterator[str]:
    """Yield what no engine could start with, one line each: `path: what is wrong`. An image of the
    user's may have another version of the engine, with other flags."""
    parser = engine_flags.load_parser(engine.type)
    for field, args in _list_fields(engine):
        if engine.image is None:
            yield from _format_lines(field, engine_flags.list_unknown(args, parser))
        yield from _format_lines(field, engine_flags.list_managed(args))
        yield from _format_lines(field, engine_flags.list_wrong_values(args, parser))
    if engine.has_flag(_AUTO_TOOLS) and not engine.has_flag(_TOOL_PARSER):
        yield f"{_FIELD}: {_AUTO_TOOLS}: vLLM needs {_TOOL_PARSER} with it"
    if isinstance(engine, DeploymentEngine):
        for role in Role:
            yield from _list_role_faults(engine, role)


def list_argument_warnings(engine: EngineSpec) -> Iterator[str]:
    """Yield flags that the image of the user may have, and the engine of Cleave's does not."""
    if engine.image is not None:
        parser = engine_flags.load_parser(engine.type)
        for field, args in _list_fields(engine):
            yield from _format_lines(field, engine_flags.list_unknown(args, parser))


def _list_fields(engine: EngineSpec) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each field with arguments, and these."""
    yield _FIELD, engine.args
    if isinstance(engine, DeploymentEngine):
        for role in Role:
            yield f"spec.engine.roles.{role}.args", engine.get_role(role).args


def _list_role_faults(engine: DeploymentEngine, role: Role) -> Iterator[str]:
    field, own, merged = f"spec.engine.roles.{role}", engine.get_role(role), engine.for_role(role)
    for name in engine_flags.list_names(own.args):
        if name == SPECULATION_FLAG and _has_same_drafts(engine, merged):
            continue
        if name in _SHARED or f"--{name.removeprefix('--no-')}" in _SHARED:
            yield f"{field}.args: {name}: must be the same for all roles; write it into {_FIELD}"
        elif engine.scheduling is not None and name in _SCHEDULERS:
            yield f"{field}.args: {name}: spec.engine.scheduling sets it; remove one of them"
    for part, count in (("args", len(merged.args)), ("env", len(merged.env))):
        if count > _MAX_MERGED and getattr(own, part):
            yield f"{field}.{part}: at most {_MAX_MERGED} with those of all roles (got {count})"


def _has_same_drafts(shared: EngineSpec, own: EngineSpec) -> bool:
    """Whether the engines of one role speculate as all do, but for how many tokens they draft."""
    configs = [dict(read_speculation(each) or {}) for each in (shared, own)]
    return all(each.pop(_DRAFTED, None) for each in configs) and configs[0] == configs[1]


def _format_lines(field: str, lines: Iterator[str]) -> Iterator[str]:
    return (f"{field}: {line}" for line in lines)
