"""What of a KV transfer is waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.hardware.gpu import find
from cleave.perf.hardware.kv_transfer import KvTransfer, kv_transfer
from cleave.perf.hardware.link import Link, LinkKind, between_nodes, within_node
from cleave.perf.model import model_shape

A100 = find("A100-SXM-80GB")
H100 = find("H100-SXM-80GB")
OPT_66B = model_shape.load("opt-66b")
transfers = st.builds(
    KvTransfer,
    latency_ms=st.floats(0, 1),
    token_ms=st.floats(1e-5, 1),
    num_layers=st.integers(1, 128),
    compute_token_ms=st.floats(1e-3, 1),
)


def test_distserves_example_needs_the_bandwidth_that_the_paper_states() -> None:
    # Section 3.3: 512 tokens of OPT-66B are about 1.13 GB (GiB, in fact).
    assert OPT_66B.kv_bytes_per_token * 512 / 2**30 == pytest.approx(1.13, abs=0.01)


def test_a_whole_prompt_moves_in_the_time_of_its_bytes() -> None:
    link = Link(LinkKind.INFINIBAND, 25)
    transfer = kv_transfer(OPT_66B, link, (1, 1), (1, 1), 0.3)
    assert transfer.serialised_ms(512) == pytest.approx(
        512 * OPT_66B.kv_bytes_per_token / (link.effective_gb_per_s * 1e6) + link.start_ms
    )


def test_nvlink_hides_what_a_slow_network_shows() -> None:
    near = kv_transfer(OPT_66B, within_node(A100), (4, 1), (4, 1), 0.15)
    far = kv_transfer(OPT_66B, between_nodes(A100, 25, 5), (4, 1), (4, 1), 0.15)
    assert near.serialised_ms(512) < 2
    assert far.serialised_ms(512) > 30 * near.serialised_ms(512)


def test_every_gpu_moves_its_share_over_its_own_link() -> None:
    link = within_node(A100)
    one = kv_transfer(OPT_66B, link, (1, 1), (1, 1), 0.3)
    four = kv_transfer(OPT_66B, link, (4, 1), (4, 1), 0.3)
    staged = kv_transfer(OPT_66B, link, (2, 2), (2, 2), 0.3)
    assert one.token_ms == pytest.approx(4 * four.token_ms)
    assert staged.token_ms == pytest.approx(four.token_ms)


@pytest.mark.parametrize(("prefill", "decode"), [((1, 1), (4, 1)), ((4, 1), (1, 1))])
def test_the_side_with_fewer_gpus_sets_the_time(
    prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    link = within_node(A100)
    uneven = kv_transfer(OPT_66B, link, prefill, decode, 0.3)
    assert uneven.token_ms == pytest.approx(kv_transfer(OPT_66B, link, (1, 1), (1, 1), 1).token_ms)


def test_replicated_heads_are_pulled_by_every_gpu_that_keeps_them() -> None:
    shape = model_shape.load("qwen3-30b-a3b")
    link = within_node(A100)
    four = kv_transfer(shape, link, (4, 1), (4, 1), 0.1)
    eight = kv_transfer(shape, link, (4, 1), (8, 1), 0.1)
    assert eight.token_ms == pytest.approx(2 * four.token_ms)


def test_splitwises_constant_and_threshold_come_out_in_their_order() -> None:
    # Section VI-A: on H100 a constant of about 5 ms stays visible, and 512 tokens are the
    # threshold; the paper's BLOOM over 8 + 8 GPUs with a 400 Gbit/s card each.
    transfer = kv_transfer(
        model_shape.load("bloom"), between_nodes(H100, 400, 5), (8, 1), (8, 1), 0.2
    )
    assert transfer.overlap_from_tokens == pytest.approx(512, rel=0.35)
    assert transfer.per_layer_ms(1500) == pytest.approx(5.2, rel=0.1)
    assert transfer.serialised_ms(1500) > 20


@given(transfer=transfers, tokens=st.integers(1, 100_000))
def test_the_threshold_is_where_per_layer_becomes_the_faster_way(
    transfer: KvTransfer, tokens: int
) -> None:
    threshold = transfer.overlap_from_tokens
    gain = transfer.serialised_ms(tokens) - transfer.per_layer_ms(tokens)
    if threshold is None or tokens < threshold - 1:
        assert gain <= 1e-6
    elif tokens > threshold:
        assert gain >= -1e-6


@given(transfer=transfers, tokens=st.integers(1, 100_000), chunk=st.integers(1, 8192))
def test_nothing_hides_more_than_there_is(transfer: KvTransfer, tokens: int, chunk: int) -> None:
    chunked = transfer.per_chunk_ms(tokens, chunk)
    assert transfer.latency_ms <= chunked <= transfer.serialised_ms(tokens) + 1e-9
    assert transfer.per_layer_ms(tokens) >= transfer.latency_ms + transfer.layered_latency_ms - 1e-6


def test_a_link_slower_than_the_prompt_shows_the_rest() -> None:
    transfer = KvTransfer(latency_ms=0, token_ms=1.0, num_layers=10, compute_token_ms=0.5)
    assert transfer.per_chunk_ms(1000, 100) == pytest.approx(100 + 900 * 0.5)
    assert transfer.overlapped_token_ms == pytest.approx(0.5 * 0.9)


def test_a_single_layer_hides_nothing() -> None:
    transfer = KvTransfer(latency_ms=0, token_ms=1.0, num_layers=1, compute_token_ms=5)
    assert transfer.overlap_from_tokens is None
