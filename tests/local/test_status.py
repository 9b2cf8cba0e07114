"""Rows of `cleave status`."""

from cleave.local.state import DeploymentSnapshot, PodView
from cleave.local.status import build_row
from cleave.rpc.v1 import agent_pb2


def test_an_agent_of_a_newer_version_has_a_row() -> None:
    health = agent_pb2.HealthResponse(
        registration=agent_pb2.Registration(instance="x", role=9, state=9)
    )
    pod = PodView("x", "decode", "127.0.0.1:1", 1, True, 0, "", None, 0.0)
    row = build_row(pod, DeploymentSnapshot("d", 1, "http://127.0.0.1:2"), health)
    assert (row.role, row.state) == ("unknown_9", "unknown_9")
