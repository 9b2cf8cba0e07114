"""Owners in processes of their own, and every way that their KV can take."""

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.transport import Transport  # noqa: E402
from cleave_worker.transfer.transports import cuda_ipc  # noqa: E402

from tests.support.kv_connections import ConnectedPairs  # noqa: E402
from tests.support.kv_server_process import OwnerProcess  # noqa: E402
from tests.support.mapping_calls import FakeMappingCalls, find_fake_calls  # noqa: E402


@pytest.fixture(
    params=[Transport.SHARED_MEMORY, Transport.CUDA_IPC, Transport.NIXL, Transport.GLOO]
)
def way(request: pytest.FixtureRequest, over_tcp: None) -> Transport:
    if request.param is Transport.NIXL:
        pytest.importorskip("nixl", reason="NIXL comes with the worker extras")
    return Transport(request.param)


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeMappingCalls]]:
    """CUDA IPC without a GPU; all that was opened has to be closed."""
    monkeypatch.setattr(cuda_ipc, "find_calls", find_fake_calls)
    FakeMappingCalls.opened.clear()
    yield FakeMappingCalls
    assert not +FakeMappingCalls.opened


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL as between hosts: on one host it would read an owner that has no part in it."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def start_owner() -> Iterator[Callable[..., OwnerProcess]]:
    started: list[OwnerProcess] = []

    def start(**options: object) -> OwnerProcess:
        started.append(OwnerProcess(**options))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def pairs() -> Iterator[ConnectedPairs]:
    """Connections between two ends in this process."""
    connected = ConnectedPairs()
    yield connected
    connected.close()
