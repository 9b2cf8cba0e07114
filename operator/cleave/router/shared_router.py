"""A router that shares load accounting with other processes. Created by the server of each process.

What is hard: processes that pick at the same time read the same scores and select the same
instance, where one request waits behind the other although another instance is idle. That is rare
but, with many instances, costly (benchmarks/dispatch, processes). So after a selection each process
checks whether another one was faster, and if so selects again.
"""

from collections.abc import Collection

from cleave.router.registry import ServedModel
from cleave.router.router import Router, Selection
from cleave.router.selection import RoutingRequest
from cleave.router.shared_score_table import ChangeLogScoreTable

_MAX_ATTEMPTS = 3
"""Limit of selections per request; other processes may be faster each time."""


class SharedRouter(Router):
    """The router of one process; its registry has shared load accounting."""

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
