"""The day's figures as a table."""

from collections.abc import Sequence

from deployment import ORACLE
from rich.table import Table
from scoring import Result


def build_table(results: Sequence[Result]) -> Table:
    """A row per mode; attainment per phase."""
    oracle = next((each.attained for each in results if each.mode == ORACLE), None)
    table = Table(title="A day in minutes: attainment by phase, and what it took")
    table.add_column("mode", no_wrap=True)
    for phase in results[0].phases:
        table.add_column(phase.phase, justify="right")
    for column in ("all", "of oracle", "failed", "flips", "plans", "hours", "late ms", "busy"):
        table.add_column(column, justify="right")
    for each in results:
        table.add_row(
            each.mode,
            *(f"{phase.attainment:.1%}" for phase in each.phases),
            f"{each.attainment:.1%}",
            f"{each.attained / oracle:.1%}" if oracle else "-",
            str(each.failed),
            str(each.flips),
            str(each.replans),
            f"{each.instance_hours:.2f}",
            f"{each.late_p99_ms:.1f}",
            f"{each.busy_share:.0%}",
        )
    return table
