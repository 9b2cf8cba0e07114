"""What the router asks of boards side by side: revisions of one model during a roll-out."""

import math
from collections.abc import Collection

from cleave.policy.dispatch import NONE, RECENCY
from cleave.router.board import Board
from cleave.router.directory import Model

RESIDENT_WEIGHT = 0.1
"""What a token in a decode instance weighs beside one that waits for prefill, between revisions.

The latter is computed; the former is read once for each token that the newcomer puts out, some
hundred times for a thousandth of the work. A new revision's empty decode side thus draws requests,
but not so many that its prompts queue.
"""


def is_busy(known: Model, tokens: int) -> bool:
    """Whether every prefill instance has more to do than this prompt."""
    queues = [
        board.pending_prompt.find(slot)
        for board in known.boards
        if (slot := board.prefill.find_least()) != NONE
    ]
    return min(queues, default=math.inf) >= tokens


def count_todo(board: Board, first: int, second: int) -> float:
    """What waits before a request on these slots, in prompt tokens; ties by their last turn."""
    resident = board.instances[second].ledger.resident.pending
    turn = board.instances[first].ledger.last_turn * RECENCY
    return board.pending_prompt.find(first) + RESIDENT_WEIGHT * resident + turn


def find_slots(board: Board, names: Collection[str]) -> list[int]:
    """The slots of named instances."""
    return [s for s, i in enumerate(board.instances) if i.name in names] if names else []
