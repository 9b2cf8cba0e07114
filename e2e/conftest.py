"""Fixtures that several end-to-end tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave.local.smollm2.preparation import get_or_prepare
from cleave.local.tiny_model import build

from e2e.cluster.cluster import Cluster, has_addresses, opened
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.support.clients_environment import set_up
from tests.support.pytest_hooks import pytest_collection as pytest_collection
from tests.support.pytest_hooks import pytest_sessionfinish as pytest_sessionfinish


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its tokenizer, built here."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path)
    return path


@pytest.fixture(scope="session")
def speaking_model() -> Path:
    """SmolLM2 from the user's cache. `make caches` puts it there, before networks are isolated."""
    return get_or_prepare(lambda *_: None)


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of programs that e2e/clients asks for."""
    return set_up()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Kubernetes cluster: the one of KUBECONFIG, or one of our own without nodes."""
    if not {"KUBECONFIG", FOLDER_VARIABLE} & {*os.environ} and not has_addresses():
        pytest.skip("no pod addresses here: run `make e2e`")
    with opened(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    with cluster.lend_namespace() as name:
        yield name
