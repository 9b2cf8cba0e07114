"""Streams of clients computed again as a whole: right ones pass, wrong ones suspend their pair."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cleave.gateway.failover import handoff_sampling
from cleave.gateway.failover.handoff_sampling import MAX_OUTPUT_TOKENS
from cleave.gateway.upstream.handoff_samples import HandoffSamples
from cleave.gateway.upstream.response_types import CompletionChoice, CompletionLogprobs
from cleave.gateway.witness.auditor import Auditor, compare_outputs
from cleave.policy.pair_trust import TokenVerdict
from cleave.rpc.v1 import agent_pb2
from cleave_worker.emulator import sequence
from cleave_worker.emulator.faults import PairFault

BODY = {
    "model": "m",
    "prompt": "a question of some length " * 20,
    "max_tokens": 12,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture
def make_sampled(make_fleet):
    """Two engines behind a gateway that samples, and leaves the audits to the test."""

    async def make(share: float = 1.0):
        stage, engines = await make_fleet({"p": "prefill", "d": "decode"}, recomputes=True)
        stage.context.handoff_samples = HandoffSamples(share)
        return stage, engines

    return make


@contextlib.asynccontextmanager
async def audited(stage) -> AsyncIterator[list]:
    """An auditor, and what it sends to agents."""
    sent = []

    async def send(agent: str, proofs: agent_pb2.PairProofs) -> None:
        sent.append((agent, proofs))

    task = asyncio.create_task(Auditor(stage.context, send).run())
    try:
        yield sent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def audit(stage, body: dict = BODY, path: str = "/v1/completions") -> str:
    """The result of the audit of one request."""
    assert (await stage.ask(body, path)).status == 200
    audits = stage.context.metrics.audits
    await stage.until(lambda: audits, "the request is audited")
    (result,) = audits
    return result


CHAT = {key: value for key, value in BODY.items() if key != "prompt"} | {
    "messages": [{"role": "user", "content": "a question " * 30}]
}


@pytest.mark.parametrize(("body", "path"), [(BODY, "completions"), (CHAT, "chat/completions")])
async def test_right_tokens_are_confirmed(make_sampled, body: dict, path: str) -> None:
    stage, _ = await make_sampled()
    async with audited(stage) as sent:
        assert await audit(stage, body, f"/v1/{path}") == "same"
    assert not sent
    assert stage.context.metrics.canary_seconds["audit"] > 0
    await stage.until_idle()


@pytest.mark.parametrize(
    ("min_tokens", "num_compared"), [(10, MAX_OUTPUT_TOKENS), (12, MAX_OUTPUT_TOKENS), (10, 6)]
)
async def test_an_output_that_min_tokens_kept_going_is_confirmed(
    make_sampled, monkeypatch, min_tokens: int, num_compared: int
) -> None:
    monkeypatch.setattr(sequence, "_EOS_PERIOD", 2)
    monkeypatch.setattr(handoff_sampling, "MAX_OUTPUT_TOKENS", num_compared)
    stage, _ = await make_sampled()
    async with audited(stage):
        assert await audit(stage, BODY | {"min_tokens": min_tokens}) == "same"


async def test_wrong_tokens_suspend_the_pair_and_name_it_without_the_text(
    make_sampled, caplog
) -> None:
    stage, engines = await make_sampled()
    engines["d"].engine.faults.pairs = {"boot-p": PairFault.LAYOUT}
    async with audited(stage) as sent:
        assert await audit(stage) == "different"
        await stage.until(lambda: sent, "the agent is called")
    ((agent, proofs),) = sent
    assert (agent, proofs.proofs[0].trust) == ("d", agent_pb2.TRUST_SUSPECT)
    (table,) = stage.context.router.registry.list_tables()
    assert table.closed_pairs.count
    assert "p -> d: a request's tokens differ" in caplog.text
    assert "a question" not in caplog.text


async def test_engines_with_other_weights_are_no_judges_of_a_stream(make_sampled) -> None:
    """As during a roll-out of weights, which would else suspend pairs that are right."""
    stage, _ = await make_sampled()
    assert (await stage.ask(BODY)).status == 200
    registry = stage.context.router.registry
    for instance in list(registry.instances.values()):
        event = agent_pb2.WatchEvent(registration=instance.registration)
        event.registration.revision = "r1@b2"
        registry.on_event(instance.agent, event, instance.last_event_at)
    async with audited(stage) as sent:
        audits = stage.context.metrics.audits
        await stage.until(lambda: audits, "the request is audited")
    assert (dict(audits), sent) == ({"skipped": 1}, [])


@pytest.mark.parametrize(
    "fields", [{"temperature": 1}, {"seed": 4}, {"stream": False}, {"stop": ["x"]}, {"n": 2}]
)
async def test_what_cannot_be_compared_is_no_sample(make_sampled, fields: dict) -> None:
    stage, _ = await make_sampled()
    assert (await stage.ask(BODY | fields)).status == 200
    assert stage.context.handoff_samples.take() is None


async def test_one_in_so_many_handoffs_is_a_sample(make_sampled) -> None:
    stage, _ = await make_sampled(0.25)
    for number in range(12):
        await stage.ask(BODY | {"prompt": f"{number} {BODY['prompt']}"})
    samples = stage.context.handoff_samples
    assert [samples.take() is not None for _ in range(4)] == [True, True, True, False]


async def test_a_sample_that_no_engine_can_compute_is_skipped(make_sampled) -> None:
    stage, engines = await make_sampled()
    await stage.ask(BODY)
    engines["d"].engine.faults.apply(b'{"refuse": true}')
    engines["p"].engine.faults.apply(b'{"refuse": true}')
    async with audited(stage):
        await stage.until(lambda: stage.context.metrics.audits["skipped"], "it is skipped")


def choice(ids: list[int], **logprobs: float) -> CompletionChoice:
    top = [{f"token_id:{key[1:]}": value for key, value in logprobs.items()}] * len(ids)
    return CompletionChoice("", CompletionLogprobs(["x"] * len(ids), top), ids)


@pytest.mark.parametrize(
    ("got", "right", "verdict"),
    [
        ([1, 2, 3], choice([1, 2, 3]), TokenVerdict.SAME),
        ([1, 2, 9], choice([1, 2, 3], t3=-0.7, t9=-0.8), TokenVerdict.NEAR_TIE),
        ([1, 2, 9], choice([1, 2, 3], t3=-0.1, t9=-2.9), TokenVerdict.DIFFERENT),
        ([1, 2, 9], choice([1, 2, 3], t3=-0.1), TokenVerdict.DIFFERENT),
        ([9, 8, 7], choice([1, 2, 3], t1=-0.7, t9=-0.7), TokenVerdict.NEAR_TIE),
        ([1, 2], choice([1, 2, 3]), TokenVerdict.SAME),
        ([1], CompletionChoice("", None, [2]), TokenVerdict.DIFFERENT),
    ],
)
def test_only_the_first_token_that_differs_counts(
    got: list[int], right: CompletionChoice, verdict: TokenVerdict
) -> None:
    assert compare_outputs(got, right) is verdict


async def test_a_gateway_audits_by_itself(make_fleet) -> None:
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"}, audit_share=1.0)
    assert await audit(stage) == "same"
