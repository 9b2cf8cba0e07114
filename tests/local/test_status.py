"""Rows of `cleave status`."""

from cleave.local.state import DeploymentSnapshot, PodView
from cleave.local.status import build_row, merge_ranks
from cleave.rpc.v1 import agent_pb2


def test_an_agent_of_a_newer_version_has_a_row() -> None:
    health = agent_pb2.HealthResponse(
        registration=agent_pb2.Registration(instance="x", role=9, state=9)
    )
    pod = PodView("x", "decode", "127.0.0.1:1", 1, True, 0, "", None, 0.0)
    row = build_row(pod, DeploymentSnapshot("d", 1, "http://127.0.0.1:2"), health)
    assert (row.role, row.state) == ("unknown_9", "unknown_9")


def rank(running: int, state: "agent_pb2.State.ValueType", source: str) -> agent_pb2.HealthResponse:
    return agent_pb2.HealthResponse(
        registration=agent_pb2.Registration(state=state, reason=source),
        load=agent_pb2.LoadReport(num_running=running, kv_cache_usage=running / 10),
        pairs=agent_pb2.PairProofs(proofs=[agent_pb2.PairProof(source=source)]),
    )


def test_data_parallel_ranks_are_one_row() -> None:
    one, two = rank(2, agent_pb2.STATE_READY, "a"), rank(3, agent_pb2.STATE_VERIFYING, "b")
    merged = merge_ranks([one, two])
    assert merged is not None
    assert merged.registration == two.registration, "the pod waits for this one"
    assert merged.load == agent_pb2.LoadReport(num_running=5, kv_cache_usage=0.3)
    assert [each.source for each in merged.pairs.proofs] == ["a", "b"]
    assert merge_ranks([one]) == one
    assert merge_ranks([one, None]) is None


def test_ranks_that_have_loaded_different_weights_are_seen_in_their_row() -> None:
    one, two = rank(0, agent_pb2.STATE_READY, "a"), rank(0, agent_pb2.STATE_READY, "b")
    for each, weights, read_ms in ((one, "b2", 2_000), (two, "a1", 1_000)):
        each.registration.weights, each.registration.weights_read_ms = weights, read_ms
    pod = PodView("x", "decode", "127.0.0.1:1", 1, True, 0, "", None, 0.0)
    row = build_row(pod, DeploymentSnapshot("d", 1, "http://127.0.0.1:2"), merge_ranks([one, two]))
    assert (row.weights, row.weights_read_s, row.weights_fault) == ("a1.b2", 2.0, "")
