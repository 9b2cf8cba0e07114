"""Manifests for the tests of resources."""

from collections.abc import Callable
from typing import Any

import pytest

Manifest = dict[str, Any]


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """Makes the smallest manifest with further spec fields."""

    def make(name: str = "chat", **spec: object) -> Manifest:
        return {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {"model": "org/model", "slo": {"ttftMs": 400, "tpotMs": 40}, **spec},
        }

    return make
