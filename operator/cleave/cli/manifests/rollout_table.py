"""The steps of a rollout as a terminal table and as JSON."""

from collections.abc import Mapping, Sequence

from cleave.api.role import Role
from cleave.cli.output.tables import build_plain_table, print_full_width, print_json
from cleave.controller.rollout.planner import RolloutLimits
from cleave.controller.rollout.preview import PreviewStage
from cleave.planner.result.text import format_percent

_ROLE_CHANGE_HINT = (
    "Instances whose pools differ only in the role change their role instead, at once and "
    "without a restart."
)


def show(
    name: str, before: str | None, after: str, limits: RolloutLimits, stages: Sequence[PreviewStage]
) -> None:
    """Print a summary, then a line per step; cells are never truncated."""
    from rich.console import Console

    console = Console(highlight=False)
    what = f"revision {before or 'none'} -> {after}" if before != after else f"revision {after}"
    console.print(f"{name}: {what}; {_summarize(limits, stages)}", markup=False, soft_wrap=True)
    if len(stages) > 1:
        roles = list(stages[0].roles)
        table = build_plain_table((), ("STEP", *(role.upper() for role in roles), "CAPACITY"))
        table.add_column("WHAT", no_wrap=True)
        for number, stage in enumerate(stages):
            counts = (f"{each.new}+{each.old}" for each in stage.roles.values())
            share = format_percent(min(1.0, stage.capacity))
            table.add_row(str(number or "now"), *counts, share, _describe_stage(stage))
        print_full_width(console, table)
    if before == after and _has_role_changes(stages):
        console.print(_ROLE_CHANGE_HINT, markup=False, soft_wrap=True)


def _has_role_changes(stages: Sequence[PreviewStage]) -> bool:
    """Whether one role loses instances and another role gains some."""
    first, last = stages[0].roles, stages[-1].roles
    changes = [last[role].new - each.new - each.old for role, each in first.items()]
    return min(changes, default=0) < 0 < max(changes, default=0)


def show_json(
    name: str, before: str | None, after: str, limits: RolloutLimits, stages: Sequence[PreviewStage]
) -> None:
    """Print the steps as JSON; step 0 is the current state."""
    document = {
        "deployment": name,
        "revision": {"from": before, "to": after},
        "limits": {"maxSurge": limits.max_surge, "maxUnavailable": limits.max_unavailable},
        "steps": [
            {
                "step": number,
                "capacity": round(stage.capacity, 4),
                "roles": {
                    str(role): {
                        "new": each.new,
                        "old": each.old,
                        "started": stage.started.get(role, 0),
                        "stopped": stage.stopped.get(role, 0),
                    }
                    for role, each in stage.roles.items()
                },
            }
            for number, stage in enumerate(stages)
        ],
    }
    print_json(document)


def _summarize(limits: RolloutLimits, stages: Sequence[PreviewStage]) -> str:
    if len(stages) == 1:
        return "nothing has to change"
    most = {
        role: max(stage.roles[role].new + stage.roles[role].old for stage in stages)
        for role in stages[0].roles
    }
    steps = "1 step" if len(stages) == 2 else f"{len(stages) - 1} steps"
    bounds = f"maxSurge {limits.max_surge}, maxUnavailable {limits.max_unavailable}"
    return f"{steps} with {bounds}; at most {_format_counts(most)} instances at a time"


def _describe_stage(stage: PreviewStage) -> str:
    parts = ("start", stage.started), ("drain", stage.stopped)
    return "; ".join(f"{verb} {_format_counts(each)}" for verb, each in parts if any(each.values()))


def _format_counts(counts: Mapping[Role, int]) -> str:
    return " and ".join(f"{count} {role}" for role, count in counts.items() if count)
