"""Fixtures that several end-to-end tests share."""

from pathlib import Path

import pytest

from cleave.local.tiny_model import build


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its tokenizer, built here."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path)
    return path
