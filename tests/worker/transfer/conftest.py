"""Owners in processes of their own."""

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from owner_process import OwnerProcess  # noqa: E402


@pytest.fixture
def start_owner() -> Iterator[Callable[..., OwnerProcess]]:
    started: list[OwnerProcess] = []

    def start(**told: object) -> OwnerProcess:
        started.append(OwnerProcess(**told))
        return started[-1]

    yield start
    for one in started:
        one.end()
