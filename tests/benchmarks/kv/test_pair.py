"""The benchmark's two processes move KV as engines do, whenever it is moved."""

from collections.abc import Callable
from contextlib import closing
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.transport import Transport  # noqa: E402

HOST = "127.0.0.1"
TOKENS = 128

Import = Callable[[str], ModuleType]


@pytest.mark.parametrize("way", [Transport.SHARED_MEMORY, Transport.NIXL, Transport.GLOO])
def test_prompts_come_after_they_are_computed_and_meanwhile(
    module: Import, way: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way is Transport.NIXL:
        pytest.importorskip("nixl", reason="NIXL comes with the worker extras")
        monkeypatch.setenv("UCX_TLS", "tcp")
    overlap, pair = module("overlap"), module("pair")
    shape = pair.Shape("tiny", num_layers=3, num_kv_heads=1, head_size=8)
    place = pair.Place(HOST, HOST)
    with (
        pair.opened(shape, TOKENS // pair.BLOCK_TOKENS, place) as opened,
        closing(overlap.Mover(opened, way, way.value)) as mover,
    ):
        for mode in overlap.Mode:
            for region in opened.registered.memory.regions:
                region.zero_()
            mover.visible_ms(TOKENS, mode, TOKENS // 2, 0.1)
            assert all(bool(region.all()) for region in opened.registered.memory.regions), mode


def test_scattered_blocks_are_all_blocks(module: Import) -> None:
    pair = module("pair")
    blocks = pair.blocks_of(512, scattered=True)
    assert blocks != sorted(blocks)
    assert sorted(blocks) == pair.blocks_of(512, scattered=False) == list(range(32))
