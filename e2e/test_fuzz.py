"""schemathesis over the gateway's own description, with emulated engines behind it."""

import os
import re
from pathlib import Path

import httpx
import pytest

from e2e.support.clients_environment import CLIENTS, run
from e2e.support.deployments import deployed, emulated, idle, until

SECONDS = int(os.environ.get("FUZZ_SECONDS", "8"))
"""Beside what it does in any case, about 10 s."""


ROUNDS = 4
"""At most: how many of the requests that are made up are right depends on the machine's speed."""
ANSWERED = 5
"""Fewer would not show whether valid requests are answered."""


@pytest.mark.timeout(ROUNDS * SECONDS + 560)
def test_no_request_breaks_the_gateway(clients: Path, tmp_path: Path) -> None:
    with deployed(emulated("chat", 1, 1, time_scale=0.01, lease_s=5), tmp_path, 180) as chat:
        for _ in range(ROUNDS):
            completed = run(
                *(str(clients / "schemathesis"), "--config-file"),
                *(str(CLIENTS / "schemathesis.toml"), "run", f"{chat.url}/openapi.json"),
                *("--max-time", str(SECONDS), "--no-color"),
                SCHEMATHESIS_HOOKS=str(CLIENTS / "hooks.py"),
                MODEL=chat.name,
            )
            outcomes = count_outcomes(chat.url)
            if outcomes.get(("chat", "ok"), 0) > ANSWERED:
                break
        # A prompt whose decoding was refused, or whose client left, is held until its lease ends.
        until(lambda: idle(chat), 90, "the engines are free")
        outcomes = count_outcomes(chat.url)
        assert outcomes["chat", "ok"] > ANSWERED, completed
        seen = {outcome for (_, outcome), requests in outcomes.items() if requests}
        assert not seen - {"ok", "refused", "cancelled"}, outcomes
        assert httpx.get(f"{chat.url}/health", timeout=30).json()["requests_in_flight"] == 0
        logs = [log.read_text() for log in chat.state_dir.rglob("*gateway*.log")]
        assert logs
        assert "Traceback" not in "".join(logs)


def count_outcomes(url: str) -> dict[tuple[str, str], float]:
    """Requests by model and outcome."""
    found = re.findall(
        r'^cleave_gateway_requests_total\{model="(.*)",outcome="(.*)"\} (\d+)',
        httpx.get(f"{url}/metrics", timeout=30).text,
        re.MULTILINE,
    )
    return {(model, outcome): float(count) for model, outcome, count in found}
