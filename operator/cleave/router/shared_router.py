"""A router whose load accounting other processes share. Made by the server of such a process.

What is hard: processes that pick at the same time read the same scores and choose the same
instance, where one request then waits behind the other although another instance is idle. That is
rare and, among many instances, dear (benchmarks/dispatch, processes). So each looks there, once it
has chosen, whether a sibling was faster, and chooses again.
"""

from collections.abc import Collection

from cleave.router.registry import ServedModel
from cleave.router.router import Router, Selection
from cleave.router.selection import RoutingRequest
from cleave.router.shared_score_table import ChangeLogScoreTable

_MAX_ATTEMPTS = 3
"""To choose; nothing keeps siblings from being faster each time."""


class SharedRouter(Router):
    """One process's; its registry has shared load accounting."""

    def _select(
        self,
        model: str,
        served: ServedModel,
        request: RoutingRequest,
        colocated: bool,
        exclusions: list[Collection[str]],
        prefill_lost: bool,
    ) -> Selection:
        for _ in range(_MAX_ATTEMPTS):
            for table in served.score_tables:
                table.refresh()
            selection = super()._select(model, served, request, colocated, exclusions, prefill_lost)
            first = selection[0] or selection[1]
            chosen = first.score_table
            if not (isinstance(chosen, ChangeLogScoreTable) and chosen.has_lost_race(first.slot)):
                break
        return selection
