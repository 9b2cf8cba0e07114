"""One budget for what all clients make the gateway keep."""

from cleave.gateway.http.buffer_budget import BufferBudget


class Reader:
    dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_requests_get_no_more_than_the_limit() -> None:
    budget = BufferBudget(100)
    assert [budget.reserve(60), budget.reserve(50), budget.reserve(40)] == [True, False, True]
    budget.release(60)
    assert (budget.used, budget.reserve(60)) == (40, True)


def test_who_has_not_read_for_longest_makes_room() -> None:
    budget = BufferBudget(100)
    first, second = Reader(), Reader()
    budget.add_blocked(first, 40)
    budget.add_blocked(second, 40)
    assert budget.reserve(50)
    assert (first.dropped, second.dropped, budget.used) == (True, False, 90)
    assert not budget.reserve(70), "not even without the second"
    assert not second.dropped, "it would not make room"
    assert (budget.used, budget.reserve(50)) == (90, True)
    assert (second.dropped, budget.used) == (True, 100)


def test_unread_answers_evict_each_other() -> None:
    budget = BufferBudget(100)
    readers = [Reader() for _ in range(5)]
    for reader in readers:
        budget.add_blocked(reader, 40)
    assert [reader.dropped for reader in readers] == [True, True, True, False, False]
    assert budget.used == 80


def test_a_client_that_reads_again_gives_back_what_it_took() -> None:
    budget, reader = BufferBudget(100), Reader()
    budget.add_blocked(reader, 40)
    budget.add_blocked(reader, 70)
    assert budget.used == 70
    budget.remove_blocked(reader)
    budget.remove_blocked(reader)
    assert (budget.used, reader.dropped) == (0, False)
