"""The pairs that plans and admission allow with Nixl are those that the pinned vLLM connects.

vLLM checks a pair at its first transfer, with assertions. The check itself runs here, on engines
that consist of their sizes.
"""

from types import SimpleNamespace

import pytest

from cleave.api.engine import Connector
from cleave.api.role import Parallelism

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
KV_HEADS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)


class SizesPassedError(Exception):
    """The check went on to what follows the sizes."""


class PrefillMetadata:
    """What a prefill engine says about itself, up to the first fact that is not a size."""

    engine_id = "prefill"
    block_size = 16

    @property
    def physical_blocks_per_logical_kv_block(self) -> int:
        raise SizesPassedError


def connects(prefill: int, decode: int, kv_heads: int, **kinds: bool) -> bool:
    """Whether decode engines of this tensor size take KV from prefill engines of that one."""
    name = "vllm.distributed.kv_transfer.kv_connector"
    utils = pytest.importorskip(f"{name}.utils")
    worker = pytest.importorskip(f"{name}.v1.nixl.base_worker").NixlBaseConnectorWorker
    use_mla, has_mamba = kinds.get("use_mla", False), kinds.get("has_mamba", False)
    topology = utils.TransferTopology(
        *(0, decode, 16, "decode", use_mla, has_mamba, kv_heads), attn_backends=[]
    )
    topology.register_remote_engine("prefill", utils.EngineTransferInfo(prefill, 4096, 16, 1))
    engine = SimpleNamespace(
        transfer_topo=topology, dcp_size=1, use_mla=use_mla, _has_mamba=has_mamba
    )
    try:
        worker._validate_remote_agent_handshake(engine, PrefillMetadata(), prefill)
    except AssertionError:
        return False
    except SizesPassedError:
        return True
    raise AssertionError("the check ended early")


def allows(prefill: int, decode: int, kv_heads: int | None) -> bool:
    sizes = Parallelism(tensor=prefill), Parallelism(tensor=decode)
    return Connector.NIXL.explain_incompatibility(*sizes, kv_heads) is None


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_a_pair_is_allowed_where_vllm_connects_it(kv_heads: int) -> None:
    sizes = [size for size in SIZES if size % kv_heads == 0 or kv_heads % size == 0]
    for prefill in sizes:
        for decode in sizes:
            found = allows(prefill, decode, kv_heads)
            assert found == connects(prefill, decode, kv_heads), (prefill, decode)
    assert not allows(2 * kv_heads, kv_heads, kv_heads)
    assert allows(kv_heads, 2 * kv_heads, kv_heads)


@pytest.mark.parametrize("kind", ["use_mla", "has_mamba"])
def test_models_whose_kv_is_not_split_by_heads_pair_more_widely(kind: str) -> None:
    for prefill in SIZES:
        for decode in SIZES:
            assert allows(prefill, decode, None) == connects(prefill, decode, 1, **{kind: True})
