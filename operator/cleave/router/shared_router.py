"""A router whose books other processes keep as well. Made by the server of such a process.

What is hard: processes that pick at the same time read the same scores and choose the same
instance, where one request then waits behind the other although another instance is idle. That is
rare and, among many instances, dear (benchmarks/dispatch, processes). So each looks there, once it
has chosen, whether a sibling was faster, and chooses again.
"""

from collections.abc import Collection

from cleave.router.registry import Model
from cleave.router.router import Placed, Router
from cleave.router.selection import Wish
from cleave.router.shared_score_table import LongSharedBoard

_ATTEMPTS = 3
"""To choose; nothing keeps siblings from being faster each time."""


class SharedRouter(Router):
    """One process's; its directory has shared books."""

    def _place(
        self,
        model: str,
        known: Model,
        wish: Wish,
        single: bool,
        avoids: list[Collection[str]],
        prefill_lost: bool,
    ) -> Placed:
        for _ in range(_ATTEMPTS):
            for board in known.boards:
                board.gather()
            placed = super()._place(model, known, wish, single, avoids, prefill_lost)
            first = placed[0] or placed[1]
            chosen = first.board
            if not (isinstance(chosen, LongSharedBoard) and chosen.is_overtaken(first.slot)):
                break
        return placed
