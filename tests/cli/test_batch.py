"""`cleave batch` as a command: its output, its exit codes, and runs that are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from cleave.cli.main import app

PATIENCE_S = 60.0


class Gateway(ThreadingHTTPServer):
    """Answers each request after a pause; keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.statuses: list[int] = []
        """Of the next answers; then 200."""
        self.pause_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """Clients are killed here."""


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        gateway = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        gateway.bodies.append(body)
        gateway.keys.add(self.headers.get("authorization"))
        time.sleep(gateway.pause_s)
        status = gateway.statuses.pop(0) if gateway.statuses else 200
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        answer = json.dumps({"echo": body["prompt"], "usage": usage}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write_requests(tmp_path / "requests.jsonl", 20)


def write_requests(path: Path, number: int) -> Path:
    lines = [
        {
            "custom_id": f"c{at}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": str(at)},
        }
        for at in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(requests: Path, gateway: Gateway, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "cleave.cli.main", "batch", str(requests)]
    return subprocess.Popen(
        [*command, "--endpoint", gateway.url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


def wait_for_lines(path: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline, f"{path} has fewer than {number} lines"
        time.sleep(0.005)


def test_a_batch_is_answered_and_summed_up(cli, gateway, requests) -> None:
    result = cli.invoke(app, ["batch", str(requests), "--endpoint", gateway.url, "-o", "json"])
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary.pop("durationS") >= 0
    assert summary == {
        "total": 20,
        "succeeded": 20,
        "failed": 0,
        "remaining": 0,
        "doneBefore": 0,
        "sentAgain": 0,
        "promptTokens": 60,
        "outputTokens": 40,
        "outputFile": str(requests.with_suffix(".output.jsonl")),
        "errorFile": str(requests.with_suffix(".errors.jsonl")),
    }
    answers = {each["custom_id"]: each for each in read(requests.with_suffix(".output.jsonl"))}
    assert {name: each["response"]["body"]["echo"] for name, each in answers.items()} == {
        f"c{at}": str(at) for at in range(20)
    }
    assert {body["service_tier"] for body in gateway.bodies} == {"flex"}
    assert "of 20 done" in result.stderr
    again = cli.invoke(app, ["batch", str(requests), "--endpoint", gateway.url])
    assert again.exit_code == 0
    assert "20 answered" in again.stdout
    assert len(gateway.bodies) == 20, "what has a result is not sent again"


@pytest.mark.parametrize(
    ("statuses", "change", "line"),
    [
        ([], {"body": {"model": "m", "prompt": "another"}}, 8),
        ([], {"body": {"model": "m", "prompt": "7", "seed": 1}}, 8),
        ([], {"url": "/v1/chat/completions"}, 8),
        # A request that has failed is corrected.
        ([400] * 20, {"body": {"model": "m", "prompt": "correct"}}, 8),
    ],
)
def test_a_changed_request_under_an_old_custom_id_is_not_answered_by_an_old_result(
    cli, gateway, requests, statuses, change, line
) -> None:
    gateway.statuses = statuses
    command = ["batch", str(requests), "--endpoint", gateway.url]
    assert cli.invoke(app, command).exit_code == 0
    results = requests.with_suffix(".output.jsonl").read_bytes()
    lines = read(requests)
    lines[line - 1] |= change
    # Its place in the file does not matter.
    lines[0], lines[1] = lines[1], lines[0]
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))
    again = cli.invoke(app, command)
    assert again.exit_code == 1
    assert f"line {line}: the request 'c7' has another body or url" in again.stderr
    assert "give them other custom_ids, remove their results, or name other files" in again.stderr
    assert len(gateway.bodies) == 20
    assert requests.with_suffix(".output.jsonl").read_bytes() == results
    requests.with_suffix(".output.jsonl").unlink()
    requests.with_suffix(".errors.jsonl").unlink()
    assert cli.invoke(app, command).exit_code == 0
    assert len(gateway.bodies) == 40


def test_results_of_another_file_with_the_same_custom_ids_are_refused(
    cli, gateway, requests, tmp_path
) -> None:
    other = write_requests(tmp_path / "other.jsonl", 20)
    other.write_text(other.read_text().replace('"m"', '"n"'))
    out, err = (requests.with_suffix(end) for end in (".output.jsonl", ".errors.jsonl"))
    assert cli.invoke(app, ["batch", str(requests), "--endpoint", gateway.url]).exit_code == 0
    options = ["--endpoint", gateway.url, "-O", str(out), "--error-file", str(err)]
    result = cli.invoke(app, ["batch", str(other), *options])
    assert result.exit_code == 1
    assert "as 20 of those in" in result.stderr
    assert len(gateway.bodies) == 20


def test_failed_requests_stand_in_a_file_of_their_own(cli, gateway, requests, tmp_path) -> None:
    gateway.statuses = [400, 404]
    out, err = tmp_path / "o.jsonl", tmp_path / "e.jsonl"
    options = ["--endpoint", gateway.url + "/v1", "-O", str(out), "--error-file", str(err)]
    result = cli.invoke(app, ["batch", str(requests), *options, "--api-key", "secret"])
    assert result.exit_code == 0, result.stderr
    assert (len(read(out)), len(read(err))) == (18, 2)
    assert {each["response"]["status_code"] for each in read(err)} == {400, 404}
    assert gateway.keys == {"Bearer secret"}


def test_a_run_that_is_killed_again_and_again_answers_each_request_once(gateway, tmp_path) -> None:
    number = 300
    requests = write_requests(tmp_path / "many.jsonl", number)
    output = requests.with_suffix(".output.jsonl")
    gateway.pause_s = 0.02
    for least in (20, 60, 120):
        run = start(requests, gateway)
        wait_for_lines(output, least)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    killed = len(read(output)) if output.read_bytes().endswith(b"\n") else None
    assert killed is None or killed < number, "it was killed before the end"
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_4')
    run = start(requests, gateway, "-o", "json")
    stdout, stderr = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, stderr
    ids = Counter(each["custom_id"] for each in read(output))
    assert ids == Counter(f"c{at}" for at in range(number))
    summary = json.loads(stdout)
    assert summary["doneBefore"] >= 120
    assert (summary["succeeded"], summary["failed"]) == (number, 0)
    assert not requests.with_suffix(".errors.jsonl").read_bytes()


def test_a_run_that_is_stopped_says_how_to_continue(gateway, tmp_path) -> None:
    requests = write_requests(tmp_path / "many.jsonl", 2_000)
    gateway.pause_s = 0.02
    run = start(requests, gateway)
    wait_for_lines(requests.with_suffix(".output.jsonl"), 10)
    run.send_signal(signal.SIGTERM)
    _, stderr = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "have no result yet: run the same command to continue" in stderr
    done = len(read(requests.with_suffix(".output.jsonl")))
    assert 10 <= done < 2_000


def test_a_gateway_that_is_away_is_waited_for_and_named(cli, requests, port) -> None:
    options = ["--endpoint", f"http://127.0.0.1:{port}", "--timeout", "1"]
    result = cli.invoke(app, ["batch", str(requests), *options])
    assert result.exit_code == 1
    assert "20 requests have no result yet; the last obstacle: " in result.stderr
    assert "Connect" in result.stderr


def test_a_refused_key_is_said_at_once(cli, gateway, requests) -> None:
    gateway.statuses = [401] * 20
    result = cli.invoke(app, ["batch", str(requests), "--endpoint", gateway.url])
    assert result.exit_code == 1
    assert "status 401: no valid API key: set CLEAVE_API_KEY or --api-key" in result.stderr


def test_wrong_input_is_refused_before_a_file_is_made(cli, gateway, tmp_path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"custom_id": "a"}\n{\n')
    result = cli.invoke(app, ["batch", str(wrong), "--endpoint", gateway.url])
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.jsonl"]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--endpoint", "gateway"], "--endpoint: 'gateway' must be a URL such as"),
        (["--error-file", "{file}"], "must be different files"),
    ],
)
def test_wrong_options_are_named(cli, requests, options, fault) -> None:
    options = [option.format(file=requests) for option in options]
    result = cli.invoke(app, ["batch", str(requests), *options])
    assert result.exit_code == 2
    assert fault in result.stderr


def test_a_link_to_the_file_is_the_same_file(cli, requests, tmp_path) -> None:
    link, before = tmp_path / "link.jsonl", requests.read_bytes()
    link.symlink_to(requests)
    result = cli.invoke(app, ["batch", str(requests), "-O", str(link)])
    assert result.exit_code == 2
    assert "must be different files" in result.stderr
    assert requests.read_bytes() == before


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        (".", "must be a regular file"),
        ("/", "must be a regular file"),
        ("..", "must be a regular file"),
        ("x" * 250, "No such file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_names_that_are_no_files_are_named(cli, file, fault, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli.invoke(app, ["batch", file])
    assert result.exit_code == 2
    assert fault in result.stderr


def test_a_pipe_cannot_be_read_twice(cli, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = cli.invoke(app, ["batch", str(tmp_path / "pipe")])
    assert result.exit_code == 2
    assert "must be a regular file, as it is read twice" in result.stderr


def test_the_example_of_a_job_runs_the_command_on_its_volume(cli, gateway, tmp_path) -> None:
    example = Path(__file__).parents[2] / "examples" / "batch" / "job.yaml"
    claim, job = yaml.safe_load_all(example.read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    program, *words = [*container["command"], *container["args"]]
    assert program == "cleave"
    assert "http://chat:80" in words
    requests = write_requests(tmp_path / "requests.jsonl", 3)
    words = [word.replace("http://chat:80", gateway.url) for word in words]
    words = [word.replace(mount["mountPath"], str(tmp_path)) for word in words]
    result = cli.invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["outputFile"] == str(requests.with_suffix(".output.jsonl"))
    security = container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (
        False,
        {"drop": ["ALL"]},
    ), "as the profile `restricted` demands"
