"""Weights of emulated engines: their KV is of no use to others, and tokens depend on them."""

import itertools
from array import array

import pytest

from cleave_worker.emulator import main
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.sequence import EngineRequest, Sequence

ASK = {"prompt": [11, 12, 13, 14] * 30, "max_tokens": 20, "ignore_eos": True}


async def test_each_weights_continue_in_their_own_way_wherever_they_are_loaded(serve) -> None:
    texts = [await (await serve(weights=weights)).text(ASK) for weights in ("a1", "b2", "", "a1")]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


async def test_a_handoff_between_equal_weights_continues_as_one_engine_would(serve) -> None:
    one, other = await serve("A", weights="a1"), await serve("B", weights="a1")
    params = await one.prefill(ASK)
    assert await other.text({**ASK, "kv_transfer_params": params}) == await one.text(ASK)


@pytest.mark.parametrize(("first", "second"), [("a1", "b2"), ("a1", ""), ("", "b2")])
async def test_a_handoff_of_other_weights_is_refused(serve, first: str, second: str) -> None:
    one, other = await serve("A", weights=first), await serve("B", weights=second)
    params = await one.prefill(ASK)
    status, answer = await other.post({**ASK, "kv_transfer_params": params})
    assert (status, "or other weights" in answer["error"]["message"]) == (500, True)


async def test_a_prefix_is_pulled_between_equal_weights_only(serve) -> None:
    pulled = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
    one = await serve("A", weights="a1")
    text = await one.text(ASK)
    place = one.engine.side_channel
    source = {"engine_id": "A", "host": "127.0.0.1", "port": place._port}
    for weights, expected in (("a1", 112), ("b2", 0)):
        other = await serve("B", weights=weights)
        ask = {**ASK, "kv_transfer_params": {"prefix_source": source}}
        assert (await other.text(ask) == text) is (weights == "a1")
        assert (await other.samples())[pulled] == expected, weights


def test_kv_of_other_weights_gives_wrong_tokens_to_an_engine_that_checks_nothing() -> None:
    """What a connector without a check, such as NIXL's, would do: it shows in the tokens."""
    prompt = array("I", range(100, 140))

    def compute(weights: str, source: str | None = None) -> list[int]:
        pool = BlockPool(8, 16)
        sequence = Sequence(EngineRequest("r", prompt, 8, ignore_eos=True, weights=weights))
        sequence.blocks = pool.allocate(4)
        if source is not None:
            other = Sequence(EngineRequest("r", prompt, 8, weights=source))
            other.blocks = sequence.blocks
            other.compute(len(prompt), pool)
            sequence.adopt(len(prompt), pool)
        while sequence.num_outputs < 8:
            sequence.compute(len(sequence.tokens) - sequence.num_computed, pool)
            sequence.sample()
        return list(sequence.tokens[len(prompt) :])

    for weights, source in itertools.product(("a1", "b2", ""), repeat=2):
        assert (compute(weights, source) == compute(weights)) is (weights == source)


def test_an_engine_gets_its_weights_from_its_agent() -> None:
    line = ("--model", "opt-13b")
    assert main.parse(line, {"CLEAVE_WEIGHTS": "a1"}).engine.weights == "a1"
    assert main.parse(line, {}).engine.weights == ""
