"""The command line: a process of its own, its cost at rest, and what it refuses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cleave.perf.model import model_report
from cleave.perf.model.known_models import CONFIGS
from cleave.shm.load_page import LoadPage
from cleave_worker.emulator.config import EmulatorConfigError
from cleave_worker.emulator.faults import POISON
from cleave_worker.emulator.main import parse

KV = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
BASE = ["--model", "facebook/opt-13b"]


@dataclass
class Process:
    """A running engine."""

    popen: subprocess.Popen
    url: str
    page: Path

    def cpu_s(self) -> float:
        """Processor time so far, user and system."""
        text = Path(f"/proc/{self.popen.pid}/schedstat").read_text()
        return int(text.split()[0]) / 1e9

    def rss_mb(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def post(self, body: dict) -> urllib.request.Request:
        data = json.dumps(body).encode()
        return urllib.request.Request(self.url + "/v1/completions", data)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    page = tmp_path / "load"
    with started(page, "--port", "0", "--time-scale", "0.1", "--fault-injection") as found:
        yield found


@contextlib.contextmanager
def started(page: Path, *arguments: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "cleave_worker.emulator.main", *BASE, *arguments]
    kv = ["--kv-transfer-config", json.dumps(KV)]
    environment = {
        **os.environ,
        "CLEAVE_LOAD_PAGE": str(page),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
    }
    popen = subprocess.Popen([*command, *kv], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert popen.stderr
        line = popen.stderr.readline()
        assert "http://" in line, line
        yield Process(popen, line.split()[-1], page)
    finally:
        popen.kill()
        popen.wait()
        popen.stderr.close()


def test_an_idle_engine_is_small_and_sleeps(process: Process) -> None:
    assert process.cpu_s() < 2.0
    before = process.cpu_s()
    time.sleep(1.0)
    assert process.cpu_s() - before < 0.05
    assert process.rss_mb() < 60


def test_an_engine_publishes_its_load_while_it_works_and_after(process: Process) -> None:
    with LoadPage(process.page) as page:
        idle = page.read()
        assert idle.sampled_ns
        assert (idle.kv_blocks_total, idle.kv_blocks_free) == (4134, 4134)
        body = {"prompt": [7] * 100, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(process.post(body), timeout=20) as response:
            response.readline()
            busy = page.read()
        assert (busy.num_running, busy.pending_prompt_tokens) == (1, 0)
        assert busy.kv_blocks_free <= 4134 - 7
        deadline = time.monotonic() + 10
        while page.read().num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert page.read().kv_blocks_free == 4134


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_busy_engine_at_once_with_exit_code_0(
    process: Process, number: signal.Signals
) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with urllib.request.urlopen(process.post(body), timeout=20) as response:
        response.readline()
        process.popen.send_signal(number)
        assert process.popen.wait(10) == 0


def test_the_fault_die_ends_the_process_with_exit_code_1(process: Process) -> None:
    request = urllib.request.Request(process.url + "/emulator/faults", b'{"die": true}')
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(request, timeout=20)
    assert process.popen.wait(10) == 1


def test_a_poison_request_ends_the_process_and_its_log_says_so(process: Process) -> None:
    request = process.post({"prompt": f"{POISON} 7", "max_tokens": 1})
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(request, timeout=20)
    assert process.popen.wait(10) == 1


def test_a_port_in_use_is_one_line_and_exit_code_1(process: Process) -> None:
    port = process.url.rpartition(":")[2]
    done = run(*BASE, "--port", port)
    assert done.returncode == 1
    assert "address already in use" in done.stderr
    assert done.stderr.count("\n") == 1


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cleave_worker.emulator.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_unknown_flag_is_one_line_and_exit_code_2() -> None:
    done = run(*BASE, "--speculative-config", "{}")
    assert done.returncode == 2
    assert "--speculative-config" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_the_agent_passes_to_vllm_is_accepted() -> None:
    options = parse(
        [*BASE, "--served-model-name", "m", "--host", "127.0.0.9", "--port", "81", "--dtype",
         "float32", "--enforce-eager", "--enable-lora", "--max-loras", "2", "--lora-modules",
         "sql=/adapters/sql", "--max-model-len", "512", "--max-num-seqs", "8",
         "--tensor-parallel-size", "2", "--pipeline-parallel-size", "1", "--no-enable-log-requests",
         "--kv-transfer-config", json.dumps({**KV, "engine_id": "boot", "kv_buffer_device": "cpu",
         "kv_load_failure_policy": "recompute",
         "kv_connector_extra_config": {"kv_lease_duration": 7}})],
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.9", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"},
    )  # fmt: skip
    engine, kv = options.engine, options.engine.kv_transfer
    assert (options.host, options.port, engine.served_model_name) == ("127.0.0.9", 81, "m")
    assert engine.profile.name == "distserve/opt-13b/tp2"
    assert engine.adapters == ("sql",)
    assert kv is not None
    assert (kv.engine_id, kv.port, kv.lease_s, kv.recompute_on_failure) == ("boot", 5601, 7, True)


def test_prompt_details_are_shown_only_where_the_flag_says_so() -> None:
    for flags, shows in (([], False), (["--enable-prompt-tokens-details"], True)):
        assert parse(["--model", "m", *flags], {}).engine.shows_prompt_details is shows


def test_a_model_folder_gives_its_shape_and_any_other_name_the_default(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 300,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = parse(["--model", str(tmp_path)], {}).engine
    assert (engine.max_model_len, engine.shape.num_layers) == (1024, 2)
    assert parse(["--model", "some/name"], {}).engine.shape.name == "opt-13b"


def test_an_engine_reports_its_model_beside_its_load_page(process: Process) -> None:
    written = json.loads(model_report.read(process.page))
    assert written["config"] == model_report.select_config(CONFIGS["opt-13b"])
    (group,) = written["cacheGroups"]
    assert (group["layers"], group["bytesPerToken"]) == (40, 40 * 2 * 5120 * 2)


def test_a_model_is_reported_from_its_folder_and_not_where_its_name_is_not_known(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-8b"]))
    assert parse(["--model", str(tmp_path)], {}).model_config == CONFIGS["qwen3-8b"]
    assert parse(["--model", "some/name"], {}).model_config is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--latency", "x"], "vllm/opt-66b/tp8"),
        (["--tensor-parallel-size", "8"], "no latency profile"),
        (["--max-model-len", "100000"], "does not fit"),
        (["--num-gpu-blocks-override", "3"], "does not fit"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--block-size", "0"], "at least 1"),
        (["--time-scale", "-1"], "at least"),
        (["--kv-transfer-config", "{"], "malformed"),
        (["--kv-transfer-config", "[]"], "malformed"),
        (["--kv-transfer-config", "{}"], "kv_connector"),
        (["--kv-transfer-config", json.dumps({**KV, "kv_connector": "X"})], "NixlConnector"),
        (["--kv-transfer-config", json.dumps({**KV, "kv_role": "X"})], "kv_both"),
        (["--kv-transfer-config", json.dumps(KV), "--kv-bandwidth-gbps", "0"], "above 0"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_a_reason(arguments, message) -> None:
    with pytest.raises(EmulatorConfigError, match=message):
        parse([*BASE, *arguments], {})


def test_a_broken_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmulatorConfigError, match=r"config\.json"):
        parse(["--model", str(tmp_path)], {})


def test_a_side_channel_port_must_be_a_number() -> None:
    with pytest.raises(EmulatorConfigError, match="is not a port"):
        parse(
            [*BASE, "--kv-transfer-config", json.dumps(KV)],
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"},
        )


def test_many_engines_fit_on_a_machine_because_none_loads_numpy() -> None:
    program = "import sys, cleave_worker.emulator.main; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
