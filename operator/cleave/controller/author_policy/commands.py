"""Judges the command of a container: which program of Cleave's it starts, and with which flags.

Called through the rule COMMAND of `cleave.controller.author_policy.pod_table`. What engines get
stands after `--`, for pods of several engines inside JSON. The API server's CEL reads no JSON: it
checks the program and the references to variables, and the operator the flags as well. Pure.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cleave.controller.author_policy.engine_flags import count_values, find_risk
from cleave.controller.author_policy.pod_rules import AllowLists, PodFault, matches
from cleave.perf.named_profiles import is_profile_file

_LAUNCHER = "cleave_worker.agent.cell"
_PROGRAMS = (
    "cleave.gateway.main", _LAUNCHER, "cleave_worker.agent.main", "cleave_worker.agent.worker_node",
)  # fmt: skip
_VARIABLES = (
    "CLEAVE_AGENTS", "CLEAVE_LEADER", "CLEAVE_ROLE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX",
    "POD_IP",
)  # fmt: skip
# Kubernetes replaces $(NAME) in commands, and $$ by $; in JSON a value could end its string.
_REFERENCES = rf"([^$]|\$[^(]|\$\(({'|'.join(_VARIABLES)})\))*\$?"

_OUTBOUND = {
    "--media-domains": "--allowed-media-domains",
    "--otlp-endpoint": "--otlp-traces-endpoint",
}
"""Flags of agents and gateways that an author's fields set, and the engine's of the same effect."""
_NUMBER = re.compile(r"-\d+")


@dataclass(frozen=True, slots=True)
class Command:
    """A program of Cleave's, with harmless flags of the engine and those of the chart's list."""

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401 - any JSON
        """Yield what is not allowed."""
        if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            yield PodFault(path, "no list of texts")
        elif value[:2] != ["python", "-m"] or value[2:3] == [] or value[2] not in _PROGRAMS:
            yield PodFault(path, " ".join(value[:3]))
        elif not all(re.fullmatch(_REFERENCES, each) for each in value):
            yield PodFault(path, "a reference $(...) to a variable")
        else:
            for arguments in _list_processes(value):
                yield from _list_argument_faults(arguments, path, lists)

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether the program is Cleave's, and refers to no other variable."""
        each = f"v{depth}"
        parts = [
            f"size({value}) > 2",
            f"{value}[0] == 'python'",
            f"{value}[1] == '-m'",
            f"{value}[2] in {json.dumps(_PROGRAMS)}",
            f"{value}.all({each}, {each}.matches({json.dumps(f'^{_REFERENCES}$')}))",
        ]
        return f"({' && '.join(parts)})"


COMMAND = Command()


def _list_argument_faults(
    arguments: Sequence[str], path: str, lists: AllowLists
) -> Iterator[PodFault]:
    allowed = lists.get("args", ())
    for own, flag in _OUTBOUND.items():
        if own in arguments and not matches(flag, allowed):
            yield PodFault(f"{path}[{own}]", find_risk(flag), "args", flag)
    for flag, risk in _list_risks(_get_engine_arguments(arguments)):
        if not matches(flag, allowed):
            yield PodFault(f"{path}[{flag}]", risk, "args", flag)
    for stray in _list_stray(_get_engine_arguments(arguments)):
        yield PodFault(path, f"{stray}, which is no flag's value")


def _list_processes(command: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the arguments of the program itself; those of a pod of several engines also name the
    command line of each agent, as JSON."""
    _, _, program, *arguments = command
    yield arguments
    for each in arguments if program == _LAUNCHER else ():
        if each.startswith("["):
            yield json.loads(each)


def _get_engine_arguments(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[arguments.index("--") + 1 :] if "--" in arguments else ()


def _list_risks(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag of the engine that is not harmless, with its risk; in full only, as a part of
    a name could be one of several flags."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, has_value, value = argument.partition("=")
        flag = name.replace("_", "-")
        # A profile by name is part of Cleave; a file's text would be part of an error message.
        is_named = flag == "--latency" and not is_profile_file(value if has_value else following)
        if _is_flag(argument) and not is_named and (risk := find_risk(flag)):
            yield flag, risk


def _list_stray(arguments: Sequence[str]) -> Iterator[str]:
    """Yield what follows no flag, or a flag that takes no more values: vLLM takes it for a model,
    without regard to the resource."""
    values = 0
    for argument in arguments:
        if _is_flag(argument):
            name, has_value, _ = argument.partition("=")
            values = 0 if has_value else count_values(name.replace("_", "-"))
        elif (values := values - 1) < 0:
            yield argument


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not _NUMBER.fullmatch(argument)
