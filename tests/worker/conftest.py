"""Fixtures of the worker's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def checkpoint_folder() -> Iterator[Path]:
    """A folder in memory, as in production: no checkpoint is written to a disk that is nearly full,
    and the disk of a test machine may be."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
