"""One pair of vLLM engines that the tests of this folder share.

Engines have cores of their own, so the pair ends before another test starts engines.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.support.deployments import Deployment, deployed, tiny_vllm
from e2e.vllm_pair.adapters import write_adapter
from tests.support.otel_collector import Collector, serve_grpc


@pytest.fixture(scope="package")
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector of spans, and its address."""
    with serve_grpc() as (running, url):
        yield running, url


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of LoRA adapters of the tiny model, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "law"))}


@pytest.fixture(scope="package")
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
    # A random model would go on with blanks for ever.
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    args = [
        *("--enable-lora", "--max-loras", str(len(adapters))),
        *("--structured-outputs-config", json.dumps(structured)),
        *("--otlp-traces-endpoint", collector[1]),
    ]
    manifest = tiny_vllm(
        tiny_model,
        adapters=[{"name": name, "source": str(path)} for name, path in adapters.items()],
        pools={"flipping": "Off"},
        engine={"connector": "Nixl", "scheduling": scheduling, "args": args},
        gateway={"tracing": {"endpoint": collector[1], "share": 0.0}, "accessLog": True},
    )
    with deployed(manifest, tmp_path_factory.mktemp("pair"), timeout_s=420) as deployment:
        yield deployment
