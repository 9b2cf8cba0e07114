"""Own books and stale reports, added up without counting anything twice."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.books import Book, estimate_pending

amounts = st.integers(0, 1_000_000)


def test_others_work_is_added_to_own() -> None:
    # 1,000 reported of which 300 were ours; 200 more of ours since.
    assert estimate_pending(own=500, reported=1_000, own_at_report=300) == 1_200


def test_work_the_engine_has_done_already_is_not_counted_as_negative_work_of_others() -> None:
    assert estimate_pending(own=500, reported=100, own_at_report=500) == 500


@given(amounts, amounts, amounts)
def test_an_estimate_is_never_below_own_books_nor_above_the_sum(own, reported, at_report) -> None:
    estimate = estimate_pending(own, reported, at_report)
    assert own <= estimate <= own + reported


@given(amounts, amounts)
def test_a_report_of_own_work_alone_adds_nothing(own: int, later: int) -> None:
    book = Book()
    book.enter(own)
    book.report(own)
    book.enter(later)
    assert book.pending == own + later


@given(st.lists(st.tuples(amounts, st.booleans()), max_size=60), amounts)
def test_books_come_back_to_zero_and_leave_what_others_had(steps, others: int) -> None:
    """Whatever the order of dispatches, releases and reports."""
    book, open_requests = Book(), []
    for tokens, release_one in steps:
        book.enter(tokens)
        open_requests.append(tokens)
        book.report(sum(open_requests) + others)
        assert book.pending == sum(open_requests) + others
        if release_one:
            book.close(open_requests.pop(0))
    for tokens in open_requests:
        book.close(tokens)
    assert book.own == 0
    book.report(others)
    assert book.pending == others
