"""Manifests for the tests of resources."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import resource_cases

Manifest = dict[str, Any]


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """Makes the smallest manifest with further spec fields."""

    def make(name: str = "chat", **spec: object) -> Manifest:
        return resource_cases.manifest(name=name, **spec)

    return make
