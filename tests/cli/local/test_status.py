"""What `cleave status` says of a gateway that does not serve."""

import pytest

from cleave.cli.local import status
from cleave.local import status as local_status
from cleave.local.state import DeploymentSnapshot
from cleave.local.status import GatewayHealth, InstanceRow
from cleave.manifests.labels import GATEWAY

REASON = "no instance has registered yet: 2 agents refuse this gateway"


@pytest.mark.parametrize(
    ("state", "health", "shown"),
    [
        ("ready", GatewayHealth(True), ("ready", "")),
        ("ready", GatewayHealth(False, REASON), ("not serving", REASON)),
        ("starting", GatewayHealth(False, REASON), ("starting", REASON)),
        ("starting", GatewayHealth(False, "no response", has_answered=False), ("starting", "")),
        ("CrashLoopBackOff", GatewayHealth(False, REASON), ("CrashLoopBackOff", "")),
    ],
)
async def test_the_gateways_own_reason_is_shown_where_it_answers(
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    health: GatewayHealth,
    shown: tuple[str, str],
) -> None:
    async def collect(_: DeploymentSnapshot) -> list[InstanceRow]:
        return [InstanceRow("chat-gateway", GATEWAY, state), InstanceRow("w", "mixed", "loading")]

    async def ask(_: str) -> GatewayHealth:
        return health

    monkeypatch.setattr(local_status, "collect_rows", collect)
    monkeypatch.setattr(local_status, "get_gateway_health", ask)
    gateway, worker = await status._collect_rows(DeploymentSnapshot("chat", 1, "http://x"))
    assert (gateway.state, gateway.reason) == shown
    assert (worker.state, worker.reason) == ("loading", "")
