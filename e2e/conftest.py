"""Fixtures that several end-to-end tests share."""

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from cleave.local.tiny_model import build

from e2e.cluster.cluster import Cluster, has_addresses, opened
from e2e.support.clients_environment import set_up
from e2e.support.deployments import Deployment, deployed, tiny_vllm
from e2e.support.vllm_adapters import write_adapter
from tests.support.otel_collector import Collector, serve_grpc
from tests.support.pytest_hooks import pytest_sessionfinish as pytest_sessionfinish
from tests.support.pytest_hooks import pytest_terminal_summary as pytest_terminal_summary


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its tokenizer, built here."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path)
    return path


@pytest.fixture(scope="session")
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector of spans, and its address."""
    with serve_grpc() as (running, url):
        yield running, url


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of LoRA adapters of the tiny model, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "law"))}


@pytest.fixture(scope="session")
def vllm_pair(
    tiny_model: Path,
    adapters: dict[str, Path],
    collector: tuple[Collector, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """A prefill and a decode instance of vLLM with all that these tests use, as a start takes most
    of a minute. They keep the roles that a test gives them; mixed ones have a single seat."""
    many = {"maxNumSeqs": 16}
    scheduling = {
        "order": "ShortestFirst",
        "admission": "ReserveDynamic",
        "limits": [
            *({"role": role} | many for role in ("prefill", "decode")),
            {"role": "mixed", "maxNumSeqs": 1},
        ],
    }
    modules = [f"{name}={path}" for name, path in adapters.items()]
    # A random model would go on with blanks for ever.
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    args = [
        *("--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules", *modules),
        *("--structured-outputs-config", json.dumps(structured)),
        *("--otlp-traces-endpoint", collector[1]),
    ]
    manifest = tiny_vllm(
        tiny_model,
        pools={"flipping": "Off"},
        engine={"scheduling": scheduling, "args": args},
        gateway={"tracing": {"endpoint": collector[1], "share": 0.0}, "accessLog": True},
    )
    with deployed(manifest, tmp_path_factory.mktemp("pair"), timeout_s=420) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of programs that e2e/clients asks for."""
    return set_up()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Kubernetes cluster: the one of KUBECONFIG, or one of our own without nodes."""
    if "KUBECONFIG" not in os.environ and not has_addresses():
        pytest.skip("no pod addresses here: run `make e2e`")
    with opened(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
