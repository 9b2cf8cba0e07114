"""Results of pairs reach an agent one call after the other, each with its age and number."""

import asyncio
from dataclasses import dataclass, field

from cleave.gateway.witness.pair_recorder import PairRecorder
from cleave.router.pair_proofs import PairResult
from cleave.rpc.v1 import agent_pb2

FAILED, PROVEN = agent_pb2.TRUST_FAILED, agent_pb2.TRUST_PROVEN


@dataclass
class SlowAgent:
    """Takes each call when it may."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0
    calls: list[agent_pb2.PairProofs] = field(default_factory=list)

    async def take(self, agent: str, proofs: agent_pb2.PairProofs) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.may_answer.wait()
        self.running -= 1
        self.calls.append(proofs)


async def test_an_agent_gets_one_call_at_a_time_with_the_newest_results(
    make_fleet, monkeypatch
) -> None:
    stage, _ = await make_fleet({"p0": "prefill", "p1": "prefill", "d": "decode"})
    context, agent = stage.context, SlowAgent()
    now_s = context.clock()
    monkeypatch.setattr(context, "clock", lambda: now_s)
    recorder = PairRecorder(context, agent.take)
    decode = context.router.registry.instances["d"]

    def record(prefill: str, trust: int) -> None:
        boots = f"{prefill}-boot", decode.target.boot_id
        recorder.record(decode, boots, PairResult(prefill, trust, now_s))

    record("p0", PROVEN)
    await stage.until(lambda: agent.running, "the first call runs")
    for trust in (FAILED, PROVEN, FAILED):
        record("p0", trust)
    record("p1", PROVEN)
    now_s += 1.5
    agent.may_answer.set()
    await stage.until(lambda: len(agent.calls) == 2, "both calls have ended")
    first, second = agent.calls
    assert agent.most_running == 1
    assert [each.sequence for each in first.proofs] == [1]
    assert [(p.prefill, p.trust, p.sequence, p.age_ms) for p in second.proofs] == [
        ("p0", FAILED, 4, 1_500),
        ("p1", PROVEN, 5, 1_500),
    ]
    assert {p.source for p in (*first.proofs, *second.proofs)} == {first.proofs[0].source}


async def test_more_results_than_a_call_takes_are_sent_in_several(make_fleet) -> None:
    stage, _ = await make_fleet({"p": "prefill", "d": "decode"})
    agent = SlowAgent()
    agent.may_answer.set()
    recorder = PairRecorder(stage.context, agent.take)
    decode = stage.context.router.registry.instances["d"]
    for number in range(600):
        result = PairResult(f"p{number}", PROVEN, stage.context.clock())
        recorder.record(decode, (f"{number}", decode.target.boot_id), result)
    await stage.until(lambda: len(agent.calls) == 3, "three calls")
    assert [len(each.proofs) for each in agent.calls] == [256, 256, 88]
