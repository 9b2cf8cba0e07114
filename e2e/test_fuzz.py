"""schemathesis over the gateway's own description, with emulated engines behind it."""

import os
import re
from pathlib import Path

import httpx
import pytest

from clients_environment import CLIENTS, run
from harness import deployed, emulated, idle, until

SECONDS = int(os.environ.get("FUZZ_SECONDS", "20"))
"""Beside what it does in any case, about 10 s."""


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_that_can_be_asked_breaks_the_gateway(clients: Path, tmp_path: Path) -> None:
    with deployed(emulated("chat", 1, 1, time_scale=0.01, lease_s=5), tmp_path, 60) as chat:
        told = run(
            *(str(clients / "schemathesis"), "--config-file", str(CLIENTS / "schemathesis.toml")),
            *("run", f"{chat.url}/openapi.json", "--max-time", str(SECONDS), "--no-color"),
            SCHEMATHESIS_HOOKS=str(CLIENTS / "hooks.py"),
            MODEL=chat.name,
        )
        # A prompt whose decoding was refused, or whose client left, is held until its lease ends.
        until(lambda: idle(chat), 90, "the engines are free")
        found = re.findall(
            r'^cleave_gateway_requests_total\{model="(.*)",outcome="(.*)"\} (\d+)',
            httpx.get(f"{chat.url}/metrics").text,
            re.MULTILINE,
        )
        outcomes = {(model, outcome): float(count) for model, outcome, count in found}
        # How many of what is made up is right depends on the machine's speed.
        assert outcomes.get(("chat", "ok")), told
        assert not {outcome for _, outcome in outcomes} - {"ok", "refused", "cancelled"}, outcomes
        assert httpx.get(f"{chat.url}/health").json()["requests_in_flight"] == 0
        logs = [log.read_text() for log in chat.state_dir.rglob("*gateway*.log")]
        assert logs
        assert "Traceback" not in "".join(logs)
