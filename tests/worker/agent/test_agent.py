"""Agents as pods run them, over emulated engines."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cleave.api.model_report import ModelReport
from cleave.perf.model import model_report
from cleave.perf.model.known_models import CONFIGS
from cleave.rpc.credentials import TOKEN_ENV
from cleave.rpc.engine_key import build_headers
from cleave.rpc.v1 import agent_pb2

IMPATIENT = {"health_interval": 0.2, "restart_delay": 0.05, "start_poll": 0.05}
EMULATED = ("--engine", "emulated", "--model", "opt-13b", "--served-model-name", "m")
FAST = ("--time-scale", "0.1")
FAULTS = (*FAST, "--fault-injection")


def ready(registration: agent_pb2.Registration) -> bool:
    return registration.state == agent_pb2.STATE_READY


def proven(registration: agent_pb2.Registration) -> bool:
    return ready(registration) and registration.kv_path.verified


def post(url: str, path: str, body: dict, key: str = "") -> tuple[int, dict]:
    at = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(at.hostname, at.port, timeout=60)) as to:
        headers = {"Content-Type": "application/json", **build_headers(key)}
        to.request("POST", path, json.dumps(body), headers)
        answer = to.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


@pytest.fixture
def pair(agents):
    """A prefill and a decode worker that have proven their KV path."""
    both = [
        agents.start("p-0", "prefill", *EMULATED, engine_args=FAST),
        agents.start("d-0", "decode", *EMULATED, engine_args=FAST),
    ]
    for agent in both:
        agent.until(proven)
    return both


@pytest.fixture
def in_background() -> Iterator[Callable[[Callable[[], object]], list]]:
    """Run a function beside the test; its result is in the list that comes back."""
    threads: list[threading.Thread] = []

    def start(function: Callable[[], object]) -> list:
        results: list[object] = []
        threads.append(threading.Thread(target=lambda: results.append(function())))
        threads[-1].start()
        return results

    yield start
    for thread in threads:
        thread.join(60)


def test_two_workers_prove_their_kv_path_and_say_what_they_serve(pair) -> None:
    for agent in pair:
        registration = agent.health().registration
        # About as many tokens as its model's length of 2,048 has room for, of 819,200 bytes each.
        found = re.match(
            r"p-0 -> d-0: (\S+) MB for 1,[78]\d\d tokens in", registration.kv_path.detail
        )
        assert found, registration.kv_path.detail
        assert float(found[1].replace(",", "")) >= 1700 * 0.8192
        assert registration.kv_path.transport == "emulated"
        assert registration.kv_path.transfer_ms > 0
        assert registration.kv_path.bytes_per_s > 0
        assert registration.engine == "emulated"
        assert registration.max_model_len > 0
        assert registration.kv_block_size == 16
        assert registration.kv_blocks_total > 0
        assert registration.reason == ""


def test_a_path_that_gives_the_right_tokens_without_a_byte_is_refused(agents) -> None:
    decode = agents.start("d-0", "decode", *EMULATED, engine_args=FAULTS)
    url = decode.until(
        lambda registration: registration.state == agent_pb2.STATE_VERIFYING
    ).engine_url
    post(url, "/emulator/faults", {"empty_handoff": 1000})
    prefill = agents.start("p-0", "prefill", *EMULATED, engine_args=FAULTS)
    refused = prefill.until(lambda registration: "KV test" in registration.reason)
    assert refused.state == agent_pb2.STATE_VERIFYING
    assert not refused.kv_path.verified
    assert re.match(
        r"KV test with d-0 failed: d-0 pulled no byte of the KV of \d+ prompt tokens",
        refused.reason,
    )
    post(url, "/emulator/faults", {"empty_handoff": 0})
    prefill.until(proven)


def test_a_worker_says_which_adapters_its_engine_serves(agents) -> None:
    adapters = ("--enable-lora", "--max-loras=2", "--lora-modules", "sql=/none", "law=/none")
    agent = agents.start("x-0", "mixed", *EMULATED, engine_args=(*FAST, *adapters))
    registration = agent.until(lambda registration: bool(registration.adapters))
    assert (registration.adapters, registration.max_adapters, registration.model) == (
        ["sql", "law"],
        2,
        "m",
    )
    status, answer = post(
        registration.engine_url, "/v1/completions", {"model": "law", "prompt": "hello"}
    )
    assert (status, answer["model"]) == (200, "law")


def test_a_killed_engine_comes_back_under_another_boot_id_and_is_proven_again(pair) -> None:
    prefill, _ = pair
    before = prefill.health().registration
    engine = prefill.descendants()[-1]
    os.kill(engine, signal.SIGKILL)
    after = prefill.until(lambda registration: registration.restarts >= 1 and proven(registration))
    assert after.boot_id != before.boot_id
    assert after.epoch == before.epoch
    assert after.last_failure.startswith("engine ended with status 137: killed (SIGKILL)")


def test_nothing_survives_a_killed_agent(pair, all_gone) -> None:
    prefill, _ = pair
    family = prefill.descendants()
    assert len(family) == 2
    prefill.process.kill()
    prefill.wait()
    all_gone(family)


def test_a_killed_subreaper_takes_the_engine_along_and_both_come_back(pair, all_gone) -> None:
    prefill, _ = pair
    subreaper, engine = prefill.descendants()
    os.kill(subreaper, signal.SIGKILL)
    all_gone([subreaper, engine])
    prefill.until(lambda registration: registration.restarts >= 1 and proven(registration))


def test_sigterm_lets_running_requests_finish(pair, in_background, all_gone) -> None:
    _, decode = pair
    url = decode.health().registration.engine_url
    body = {"model": "m", "prompt": "a b c", "max_tokens": 1500, "ignore_eos": True}
    answers = in_background(lambda: post(url, "/v1/completions", body))
    running = agent_pb2.WatchRequest(interval_ms=10)
    for event in decode.stub.Watch(running, timeout=60):
        if event.load.num_running:
            break
    family = decode.descendants()
    decode.process.terminate()
    decode.until(lambda registration: registration.state == agent_pb2.STATE_DRAINING)
    assert decode.wait() == 0
    all_gone(family, seconds=0)
    status, answer = answers[0]
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1500


def test_a_handoff_is_held_until_it_is_pulled(pair) -> None:
    prefill, decode = pair
    order = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": "m", "prompt": "one two three " * 50, "max_tokens": 1}
    source = prefill.health().registration.engine_url
    _, answer = post(source, "/v1/completions", {**body, "kv_transfer_params": order})
    prefill.process.terminate()
    prefill.until(lambda registration: registration.state == agent_pb2.STATE_DRAINING)
    with pytest.raises(subprocess.TimeoutExpired):
        prefill.wait(1)
    target = decode.health().registration.engine_url
    pull = {**body, "kv_transfer_params": answer["kv_transfer_params"]}
    assert post(target, "/v1/completions", pull)[0] == 200
    assert prefill.wait() == 0


def test_a_second_signal_ends_a_drain_at_once(pair, in_background, all_gone) -> None:
    _, decode = pair
    url = decode.health().registration.engine_url
    body = {"model": "m", "prompt": "a", "max_tokens": 1500, "ignore_eos": True}

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            post(url, "/v1/completions", body)

    in_background(ask)
    for event in decode.stub.Watch(agent_pb2.WatchRequest(interval_ms=10), timeout=60):
        if event.load.num_running:
            break
    family = decode.descendants()
    decode.process.terminate()
    decode.until(lambda registration: registration.state == agent_pb2.STATE_DRAINING)
    decode.process.terminate()
    assert decode.wait(10) == 1
    all_gone(family, seconds=0)


def test_a_drain_call_is_answered_before_the_agent_ends(pair) -> None:
    _, decode = pair
    assert decode.stub.Drain(agent_pb2.DrainRequest(), timeout=60).empty
    assert decode.wait() == 0


def test_a_corrupt_kv_path_keeps_workers_from_ready_until_it_is_mended(agents) -> None:
    patient = ("--peer-wait", "600")
    prefill = agents.start("p-0", "prefill", *EMULATED, *patient, engine_args=FAULTS)
    registration = prefill.until(
        lambda registration: registration.state == agent_pb2.STATE_VERIFYING
    )
    assert post(registration.engine_url, "/emulator/faults", {"wrong_kv": 10**6})[0] == 200
    decode = agents.start("d-0", "decode", *EMULATED, *patient, engine_args=FAST)
    for agent in (prefill, decode):
        broken = agent.until(lambda registration: "other tokens" in registration.reason)
        assert broken.state == agent_pb2.STATE_VERIFYING
    assert post(registration.engine_url, "/emulator/faults", {"wrong_kv": 0})[0] == 200
    prefill.until(proven)
    decode.until(proven)


def test_an_engine_that_stops_answering_is_replaced(agents) -> None:
    timing = {**IMPATIENT, "health_timeout": 1.0}
    lone = agents.start("m-0", "mixed", *EMULATED, "--peer-wait", "0", timing=timing)
    lone.until(ready)
    engine = lone.descendants()[-1]
    os.kill(engine, signal.SIGSTOP)
    lone.until(lambda registration: registration.restarts >= 1 and ready(registration))
    assert "/health: no answer within 1 s, 3 times in a row" in lone.log.read_text()


def test_an_engine_whose_loop_hangs_is_replaced_although_it_says_it_is_well(
    agents, in_background
) -> None:
    lone = agents.start(
        "m-0", "mixed", *EMULATED, "--peer-wait", "0",
        engine_args=("--fault-injection",), timing={**IMPATIENT, "stall_timeout": 1.0},
    )  # fmt: skip
    url = lone.until(ready).engine_url
    body = {"model": "m", "prompt": "a", "max_tokens": 1500, "ignore_eos": True}

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            post(url, "/v1/completions", body)

    in_background(ask)
    for event in lone.stub.Watch(agent_pb2.WatchRequest(interval_ms=10), timeout=60):
        if event.load.num_running:
            break
    assert post(url, "/emulator/faults", {"hang": True})[0] == 200
    lone.until(lambda registration: registration.restarts >= 1 and ready(registration))
    assert "made no step for 1 s" in lone.log.read_text()


def test_an_engine_that_cannot_start_is_retried_and_the_reason_is_reported(agents) -> None:
    agent = agents.start("m-0", "mixed", *EMULATED, engine_args=("--no-such-flag",))
    registration = agent.until(lambda registration: registration.restarts >= 2)
    assert registration.state == agent_pb2.STATE_STARTING
    assert (
        "no-such-flag" in agent.until(lambda registration: "status" in registration.reason).reason
    )
    agent.process.terminate()
    assert agent.wait() == 0


def test_malformed_arguments_end_with_exit_code_2() -> None:
    for wrong in (["--peers", "nonsense"], ["--cores", "x"], ["--", "--kv-transfer-config", "x"]):
        command = [
            sys.executable, "-m", "cleave_worker.agent.main", "--name", "w", "--deployment", "d",
            "--role", "mixed", *EMULATED, "--host", "127.0.0.1", "--port", "0", *wrong,
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2, ended.stderr
        errors = [each for each in ended.stderr.splitlines() if "WARNING" not in each]
        assert len(errors) == 1
        assert "Traceback" not in ended.stderr


def test_roles_that_change_have_proven_the_other_way_already(pair) -> None:
    prefill, decode = pair
    for agent, role in ((prefill, agent_pb2.ROLE_DECODE), (decode, agent_pb2.ROLE_PREFILL)):
        agent.stub.SetRole(agent_pb2.SetRoleRequest(role=role, epoch=2), timeout=20)
        registration = agent.health().registration
        assert (registration.role, registration.epoch) == (role, 2)
        assert registration.kv_path.verified
        assert registration.kv_path.detail.startswith("d-0 -> p-0: ")


def test_engines_of_agents_with_a_token_ask_for_a_key_that_no_log_shows(
    agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right")
    monkeypatch.setenv(TOKEN_ENV, str(token_file))
    both = [
        agents.start("p-0", "prefill", *EMULATED, engine_args=FAST),
        agents.start("d-0", "decode", *EMULATED, engine_args=FAST),
    ]
    request = {"model": "m", "prompt": "hello", "max_tokens": 2}
    keys = set()
    for agent in both:
        registration = agent.until(proven)
        url, key = registration.engine_url, registration.engine_key
        keys.add(key)
        for path, body in (("/v1/completions", request), ("/tokenize", {"prompt": "hello"})):
            assert [post(url, path, body, each)[0] for each in ("", "x", key)] == [401, 401, 200]
        assert key not in agent.log.read_text()
    assert len(keys) == 2
    # The agent's subreaper, then the engine.
    *_, engine = both[1].descendants()
    environment = read_proc(engine, "environ")
    assert key.encode() in environment
    assert TOKEN_ENV.encode() not in environment, "the token is the agent's own"
    assert key.encode() not in read_proc(engine, "cmdline")


def read_proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def test_a_worker_reports_its_engines_model_and_caches(agents, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"]))
    engine = ("--engine", "emulated", "--model", str(tmp_path / "new"), "--served-model-name", "m")
    agent = agents.start("m-0", "mixed", *engine, engine_args=(*FAST, "--max-model-len", "4096"))
    registration = agent.until(ready)
    report = ModelReport.read_status(json.loads(registration.model_report))
    assert report.config == model_report.select_config(CONFIGS["qwen3-8b"])
    assert (report.max_model_len, report.block_size, report.kv_bytes_per_token) == (
        4096,
        registration.kv_block_size,
        147_456,
    )
