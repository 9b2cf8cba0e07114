"""A run of a batch: every request gets its result once, and stops and faults lose nothing."""

import asyncio
import json
import random
import time
from collections import Counter

import pytest

from cleave.batch import batch_run
from cleave.batch.batch_file import BatchLine
from cleave.batch.batch_run import BatchProgress, BatchRun, UnauthorizedError
from cleave.batch.pacer import INITIAL_LIMIT, Pacer
from cleave.batch.reply import MAX_TRIES, Reply
from cleave.batch.result_files import ResultFiles, ResultFilesError

ANSWER = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
OK = Reply(200, ANSWER, "r")


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch) -> None:
    monkeypatch.setattr(batch_run, "_TRY_DELAY_S", 0.0)


def make_lines(number: int) -> list[BatchLine]:
    return [BatchLine(at + 1, f"c{at}", "/v1/completions", b"{}") for at in range(number)]


class Server:
    """Answers as `script` says, else with 200; keeps what it was sent."""

    def __init__(self, script=None) -> None:
        self.sent: Counter[str] = Counter()
        self.most = self._running = 0
        self._script = script

    async def send(self, line: BatchLine) -> Reply:
        self.sent[line.custom_id] += 1
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await asyncio.sleep(0)
            return (self._script and self._script(line, self.sent[line.custom_id])) or OK
        finally:
            self._running -= 1


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def run_batch(tmp_path, server, lines, *, max_running=16, timeout_s=60.0, stop_after=None):
    """One run; its progress."""
    with ResultFiles(tmp_path / "out", tmp_path / "err") as files:
        progress = BatchProgress(len(lines), files.num_succeeded, files.num_failed)
        run = BatchRun(
            iter(lines),
            files,
            server.send,
            progress,
            max_running=max_running,
            rng=random.Random(1),
        )
        running = asyncio.create_task(run.run(timeout_s))
        if stop_after is not None:
            await until(lambda: progress.num_done >= stop_after)
            run.stop()
        await running
    return progress


def read_ids(path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


async def test_each_request_is_sent_and_recorded_once(tmp_path) -> None:
    server, lines = Server(), make_lines(200)
    progress = await run_batch(tmp_path, server, lines, max_running=8)
    assert sorted(read_ids(tmp_path / "out")) == sorted(line.custom_id for line in lines)
    assert set(server.sent.values()) == {1}
    assert server.most <= 8
    assert (progress.num_left, progress.num_failed) == (0, 0)
    assert (progress.prompt_tokens, progress.output_tokens) == (600, 400)


async def test_a_stopped_run_is_continued_where_it_stopped(tmp_path) -> None:
    server, lines = Server(), make_lines(100)
    first = await run_batch(tmp_path, server, lines, stop_after=30)
    assert 30 <= first.num_done < 100
    second = await run_batch(tmp_path, server, lines)
    assert second.num_left == 0
    assert sorted(read_ids(tmp_path / "out")) == sorted(line.custom_id for line in lines)
    assert set(server.sent.values()) == {1}, "requests in flight get their answer"


async def test_refused_requests_are_sent_again_until_they_are_taken(tmp_path) -> None:
    def refuse(line, number):
        return Reply(429, retry_after_s=0.0) if number < 20 and line.custom_id == "c3" else None

    server = Server(refuse)
    progress = await run_batch(tmp_path, server, make_lines(10))
    assert (progress.num_succeeded, progress.num_refusals) == (10, 19)
    assert progress.obstacle == ""


async def test_errors_of_engines_are_tried_again_and_then_recorded(tmp_path) -> None:
    def fail(line, number):
        if line.custom_id == "c1":
            return Reply(500, b'{"error": {"code": "engine_error"}}', "r")
        if line.custom_id == "c2":
            return Reply(fault="response truncated")
        if line.custom_id == "c3":
            return Reply(400, b"{}", "r")
        return Reply(502) if line.custom_id == "c4" and number == 1 else None

    server = Server(fail)
    progress = await run_batch(tmp_path, server, make_lines(6))
    assert (progress.num_succeeded, progress.num_failed) == (3, 3)
    assert sorted(read_ids(tmp_path / "err")) == ["c1", "c2", "c3"]
    assert server.sent == Counter(c0=1, c1=MAX_TRIES, c2=MAX_TRIES, c3=1, c4=2, c5=1)
    errors = {
        each["custom_id"]: each
        for each in map(json.loads, (tmp_path / "err").read_text().splitlines())
    }
    assert errors["c1"]["response"]["status_code"] == 500
    assert errors["c2"]["error"] == {"code": "no_response", "message": "response truncated"}


async def test_no_more_requests_are_sent_at_a_time_while_engines_fail(tmp_path) -> None:
    most = []

    def fail(line, number):
        if server.sent.total() > 4 * INITIAL_LIMIT:
            return None
        most.append(server.most)
        return Reply(502)

    server = Server(fail)
    progress = await run_batch(tmp_path, server, make_lines(200), max_running=200)
    assert progress.num_succeeded == 200
    assert max(most) <= INITIAL_LIMIT


async def test_a_process_that_stood_still_sends_what_is_due(tmp_path, monkeypatch) -> None:
    may_start = Pacer.may_start

    def stand_still(self: Pacer, now: float) -> bool:
        if not (result := may_start(self, now)):
            time.sleep(0.05)
        return result

    monkeypatch.setattr(Pacer, "may_start", stand_still)
    server = Server(lambda line, number: Reply(429, retry_after_s=0.02) if number == 1 else None)
    progress = await run_batch(tmp_path, server, make_lines(1), timeout_s=20.0)
    assert progress.num_left == 0


async def test_a_refused_key_ends_the_run_and_records_nothing(tmp_path) -> None:
    server = Server(lambda line, number: Reply(401))
    with pytest.raises(UnauthorizedError, match="no valid API key"):
        await run_batch(tmp_path, server, make_lines(500))
    assert read_ids(tmp_path / "err") == []
    assert sum(server.sent.values()) < 500


async def test_a_run_ends_with_its_time(tmp_path) -> None:
    server = Server(lambda line, number: Reply(503, retry_after_s=60.0))
    progress = await run_batch(tmp_path, server, make_lines(5), timeout_s=0.1)
    assert (progress.num_left, progress.obstacle) == (5, "status 503")


async def test_requests_that_do_not_end_are_left_to_the_next_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(batch_run, "STOP_GRACE_S", 0.01)
    server, lines = Server(), make_lines(4)

    async def hang(line: BatchLine) -> Reply:
        if line.custom_id == "c2":
            await asyncio.Event().wait()
        return await Server.send(server, line)

    hanging = Server()
    hanging.send = hang
    progress = await run_batch(tmp_path, hanging, lines, stop_after=3)
    assert progress.num_left == 1
    assert (await run_batch(tmp_path, server, lines)).num_left == 0
    assert sorted(read_ids(tmp_path / "out")) == ["c0", "c1", "c2", "c3"]


async def test_no_more_is_held_than_may_run(tmp_path) -> None:
    """While the gateway refuses all, the rest of the file is not read."""
    taken = []

    def read():
        for line in make_lines(1_000):
            taken.append(line)
            yield line

    server = Server(lambda line, number: Reply(429, retry_after_s=0.0) if number < 4 else None)
    with ResultFiles(tmp_path / "out", tmp_path / "err") as files:
        progress = BatchProgress(1_000)
        run = BatchRun(read(), files, server.send, progress, max_running=4, rng=random.Random(1))
        running = asyncio.create_task(run.run(60.0))
        await until(lambda: progress.num_refusals > 0)
        assert len(taken) <= 4
        await running
    assert progress.num_succeeded == 1_000


async def test_a_file_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch) -> None:
    def fail(self, line, result, succeeded):
        raise ResultFilesError("out: No space left on device")

    monkeypatch.setattr(ResultFiles, "add", fail)
    with pytest.raises(ResultFilesError, match="No space left"):
        await run_batch(tmp_path, Server(), make_lines(50))
