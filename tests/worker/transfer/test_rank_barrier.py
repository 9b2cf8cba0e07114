"""Two ranks of an engine that follow one prefill, in every order of what may happen to it."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from cleave_worker.transfer.block_leases import (
    BlockLeases,
    ConsumerRank,
    FinishedPrefill,
    PrefillInProgress,
)
from cleave_worker.transfer.handoff import RefusedError
from cleave_worker.transfer.progress import NO_PROGRESS, Progress
from cleave_worker.transfer.rank_barrier import RankBarrier

LONG_S = 60.0
BLOCKS = (3, 9)
RANKS = [ConsumerRank("boot-d", rank, 2) for rank in range(2)]
EVENTS = st.sampled_from(
    ["whole", "end", "give up", *((do, one) for do in ("ask", "release", "leave") for one in RANKS)]
)


@dataclass
class Course:
    """What has happened, and what must be true then."""

    holds: BlockLeases = field(default_factory=lambda: BlockLeases(LONG_S, LONG_S))
    is_whole: bool = False
    has_ended: bool = False
    is_gone: bool = False
    requested: set[ConsumerRank] = field(default_factory=set)
    done: set[ConsumerRank] = field(default_factory=set)
    has_left: bool = False
    freed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = RankBarrier(self.holds)
        self.holds.begin_prefill("theirs", PrefillInProgress(1, "d", len(BLOCKS), "name"))

    def happens(self, event: str | tuple[str, ConsumerRank]) -> None:
        match event:
            case "whole" if not self.is_gone:
                self.is_whole = True
                self.holds.update_progress("theirs", BLOCKS, Progress(2, 2, 0))
            case "end" if self.is_whole and not self.is_gone and not self.has_ended:
                self.has_ended = True
                self.holds.grant("theirs", FinishedPrefill(1, "d", BLOCKS))
            case "give up" if not self.has_ended:
                self.is_gone = True
                self.holds.cancel("theirs")
            case ("ask", rank) if rank not in self.done:
                self.ask(rank)
            case ("release", rank) if rank in self.requested - self.done:
                self.done.add(rank)
                is_held = self.is_whole and self.is_present
                assert self.turns.release(rank, "theirs", 1) is is_held
            case ("leave", rank) if rank in self.requested - self.done:
                self.done.add(rank)
                self.has_left = True
                self.turns.abandon("theirs", 1)
        self.freed += self.holds.take_freed()
        assert not self.freed or (self.freed == ["theirs"] and self.has_ended)

    def ask(self, rank: ConsumerRank) -> None:
        again = rank in self.requested
        try:
            self.holds.wait_for_progress(rank, "name", "d", NO_PROGRESS, 0.0, is_repeat=again)
        except RefusedError:
            assert not self.is_present
        else:
            assert self.is_present
            self.requested.add(rank)

    @property
    def is_present(self) -> bool:
        return not self.is_gone and not self.freed


@given(st.lists(EVENTS, max_size=12))
def test_blocks_are_freed_once_when_both_have_had_their_last_word_or_one_is_lost(
    events: list[str | tuple[str, ConsumerRank]],
) -> None:
    course = Course()
    for event in events:
        course.happens(event)
    # What remains: the prefill ends, and whoever has begun has its last word.
    for event in ("whole", "end", *(("release", rank) for rank in RANKS)):
        course.happens(event)
    is_free = course.is_gone or course.has_left or course.done == set(RANKS)
    assert course.freed == (["theirs"] if is_free and not course.is_gone else [])
    assert course.holds.num_leased == (0 if is_free else 1)
