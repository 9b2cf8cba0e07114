"""No pair, no pulled prefix and no counted cache spans engines with different weights."""

import random
from collections import defaultdict

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.gateway.metrics.pair_summary import find_partners, summarize_pairs
from cleave.router.errors import NoInstance
from cleave.router.registry import InstanceRegistry
from cleave.router.router import RequestPhase, Router
from cleave.rpc.revision import build_revision
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import run_at_once

ROLES = ("prefill", "decode", "mixed")
WEIGHTS = ("a1", "b2", "")


class RandomFleet:
    """Instances that come, go, and restart with other weights, below a router."""

    def __init__(self, router: Router, make_event, rng: random.Random) -> None:
        self.router, self._make_event, self._rng = router, make_event, rng
        self.weights: dict[str, str] = {}
        """By boot."""
        self.computed: dict[str, set[str]] = defaultdict(set)
        """Prompts that a boot has computed or has got as a handoff."""
        self.num_pairs = self.num_cached = 0
        self._boots = 0

    def start(self, name: str) -> None:
        """The engine of an instance starts, with what its agent finds."""
        rng, self._boots = self._rng, self._boots + 1
        weights, boot_id = rng.choice(WEIGHTS), f"boot{self._boots}"
        self.weights[boot_id] = weights
        path = agent_pb2.KvPath(verified=True, token_ms=0.001)
        event = self._make_event(
            name,
            rng.choice(ROLES),
            revision=build_revision("r1", weights),
            weights=weights,
            boot_id=boot_id,
            kv_path=path,
            prefix_port=7_000,
        )
        self.router.registry.on_event(name, event, 0.0)

    def ask(self, number: int) -> None:
        """One request, whose instances must have the same weights."""
        text = f"{number} " * 600
        try:
            pick = self.router.pick("m", 1_000, 10, text=text.encode(), session=None)
        except NoInstance:
            return
        first, boot = pick.prefill or pick.decode, pick.decode.boot_id
        assert self.weights[first.boot_id] == self.weights[boot]
        assert self.weights[boot] == first.revision.partition("@")[2]
        self.num_pairs += pick.prefill is not None
        self.num_cached += pick.predicted_cached > 0
        if pick.source is not None:
            assert self.weights[pick.source.boot_id] == self.weights[boot]
            assert text in self.computed[pick.source.boot_id]
        if pick.predicted_cached:
            boots = {first.boot_id} | ({pick.source.boot_id} if pick.source else set())
            assert any(text in self.computed[each] for each in boots)
        self.computed[first.boot_id].add(text)
        self.computed[boot].add(text)
        self.router.release(pick, RequestPhase.PREFILL)
        self.router.observe_completion(pick, 10)
        self.router.release(pick)


@pytest.mark.parametrize("policy", DispatchPolicy)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_spans_weights(make_event, policy: DispatchPolicy, seed: int) -> None:
    rng = random.Random(seed)
    now = 0.0
    router = Router(InstanceRegistry(policy), clock=lambda: now, seed=seed + 1)
    fleet = RandomFleet(router, make_event, rng)
    names = [f"w{number}" for number in range(rng.randint(2, 16))]
    for _ in range(400):
        now += 0.05
        if rng.random() < 0.1:
            fleet.start(rng.choice(names))
        fleet.ask(rng.randint(0, 6))
    assert fleet.num_pairs > 10
    assert fleet.num_cached > 10 or policy is not DispatchPolicy.PREFIX_AWARE


def test_a_pair_of_other_weights_waits_until_the_second_engine_has_them(
    registry, make_event
) -> None:
    router = Router(registry)

    def start(name: str, role: str, weights: str) -> None:
        revision = build_revision("r1", weights)
        event = make_event(name, role, revision=revision, boot_id=f"{name}{weights}")
        registry.on_event(name, event, 0.0)

    start("p", "prefill", "a1")
    start("d", "decode", "a1")
    assert router.pick("m", 10).reason == "disaggregated"
    start("p", "prefill", "b2")
    # The decode instance serves both phases with what it has.
    assert router.pick("m", 10).reason == "no-prefill"
    start("d", "decode", "b2")
    assert router.pick("m", 10).reason == "disaggregated"


def test_a_proof_of_a_pair_does_not_outlive_the_weights_of_either_engine(
    registry, make_event
) -> None:
    """The witness proves boots; an engine with other weights is another boot."""

    def start(name: str, role: str, weights: str) -> None:
        revision = build_revision("r1", weights)
        event = make_event(name, role, revision=revision, boot_id=f"{name}-{weights}")
        registry.on_event(name, event, 0.0)

    def count_proven() -> int:
        tables = registry.list_tables()
        partners = [run_at_once(find_partners(table)) for table in tables]
        return sum(len(summarize_pairs(boots, d).proven) for boots, ds in partners for d in ds)

    def prove(prefill: str, decode: str) -> None:
        trust = agent_pb2.TRUST_PROVEN
        proof = agent_pb2.PairProof(prefill="p", prefill_boot_id=prefill, trust=trust)
        proofs = agent_pb2.PairProofs(boot_id=decode, proofs=[proof])
        registry.on_event("d", agent_pb2.WatchEvent(pairs=proofs), 0.0)

    start("p", "prefill", "a1")
    start("d", "decode", "a1")
    prove("p-a1", "d-a1")
    assert count_proven() == 1
    start("p", "prefill", "b2")
    assert count_proven() == 0
    start("d", "decode", "b2")
    # What the agent sent of the boot before counts for it only.
    prove("p-a1", "d-a1")
    assert count_proven() == 0
    prove("p-b2", "d-b2")
    assert count_proven() == 1
