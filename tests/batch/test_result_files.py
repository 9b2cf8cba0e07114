"""The results of a batch: whole lines, each custom_id once, also after a run was killed."""

import json
import os
from pathlib import Path

import pytest

from cleave.batch import result_files
from cleave.batch.batch_file import BatchLine, hash_id
from cleave.batch.result_files import (
    ResultFiles,
    ResultFilesError,
    build_error_line,
    build_response_line,
)

A, B, C = (BatchLine(number, name, "/v1/completions", b"{}") for number, name in enumerate("abc"))


@pytest.fixture
def files(tmp_path) -> ResultFiles:
    return ResultFiles(tmp_path / "out.jsonl", tmp_path / "err.jsonl")


def answer(line: BatchLine) -> bytes:
    return build_response_line(line, 200, "r", b'{"id": 1}')


def test_results_have_the_form_of_openai() -> None:
    line = json.loads(build_response_line(A, 200, "req-1", b'{"id":\n 1}'))
    assert line == {
        "id": A.request_id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": {"id": 1}},
        "error": None,
    }
    line = json.loads(build_error_line(A, "no_response", "refused"))
    assert line["response"] is None
    assert line["error"] == {"code": "no_response", "message": "refused"}


@pytest.mark.parametrize("body", [b"<html>\n</html>", b"", b"{", b'"\xff"'])
def test_a_body_that_is_no_json_becomes_a_text_on_one_line(body) -> None:
    result = build_response_line(A, 502, "r", body)
    assert result.count(b"\n") == 1
    assert isinstance(json.loads(result)["response"]["body"], str)


def test_what_has_a_result_is_done_also_for_the_next_run(files) -> None:
    with files:
        files.add(A, answer(A), succeeded=True)
        files.add(B, build_error_line(B, "x", "y"), succeeded=False)
        assert (files.is_done("a"), files.is_done("b"), files.is_done("c")) == (True, True, False)
    again = ResultFiles(files.output, files.errors)
    with again:
        assert (again.num_succeeded, again.num_failed) == (1, 1)
        assert (again.is_done("a"), again.is_done("b"), again.is_done("c")) == (True, True, False)
        again.add(C, answer(C), succeeded=True)
    assert files.output.read_bytes() == answer(A) + answer(C)


@pytest.mark.parametrize("cut", [1, 10, len(answer(B)) - 1])
def test_half_a_line_of_a_killed_run_is_cut_off(files, cut) -> None:
    files.output.write_bytes(answer(A) + answer(B)[:cut])
    with files:
        assert files.num_succeeded == 1
        assert not files.is_done("b")
        files.add(B, answer(B), succeeded=True)
    assert files.output.read_bytes() == answer(A) + answer(B)


def test_a_full_disk_leaves_no_half_line(files, monkeypatch) -> None:
    with files:
        files.add(A, answer(A), succeeded=True)
        write, numbers = os.write, iter([5])

        def write_little(fd: int, data: memoryview) -> int:
            for number in numbers:
                return write(fd, data[:number])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(result_files.os, "write", write_little)
        with pytest.raises(ResultFilesError, match=r"out.jsonl: No space left"):
            files.add(B, answer(B), succeeded=True)
        monkeypatch.undo()
        assert not files.is_done("b")
    assert files.output.read_bytes() == answer(A)


def test_two_runs_cannot_write_to_the_same_files(files) -> None:
    with (
        files,
        pytest.raises(ResultFilesError, match="another run writes to it"),
        ResultFiles(files.output, files.errors),
    ):
        pass
    with ResultFiles(files.output, files.errors):
        pass


REQUEST = '{"custom_id": "a", "url": "/v1/completions", "body": {"model": "m"}}'


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', "[]\n", REQUEST + "\n" + REQUEST])
def test_a_file_of_something_else_is_not_touched(files, text) -> None:
    files.output.write_text(text)
    with pytest.raises(ResultFilesError, match="line 1 is not a result"), files:
        pass
    assert files.output.read_text() == text


@pytest.mark.parametrize("text", ["a note", REQUEST, '{"id":"chatcmpl-1"}'])
def test_a_last_line_that_does_not_end_is_cut_off_only_if_it_is_of_a_result(files, text) -> None:
    files.errors.write_bytes(answer(A) + text.encode())
    with pytest.raises(ResultFilesError, match=r"err\.jsonl: line 2, which does not end"), files:
        pass
    assert files.errors.read_bytes() == answer(A) + text.encode()


def test_zeros_that_a_machine_left_are_cut_off(files) -> None:
    files.output.write_bytes(answer(A) + answer(B)[:30] + bytes(100))
    with files:
        assert files.num_succeeded == 1
    assert files.output.read_bytes() == answer(A)


def test_a_device_is_no_file_of_results(files) -> None:
    nowhere = ResultFiles(Path("/dev/null"), files.errors)
    with pytest.raises(ResultFilesError, match="/dev/null: must be a regular file"), nowhere:
        pass


def test_results_of_another_batch_are_noticed(files, tmp_path) -> None:
    files.output.write_bytes(answer(A) + answer(B))
    known = {hash_id(each.custom_id): each.request_id for each in (A, B)}
    with files:
        files.check_belongs(known, tmp_path / "batch")
        with pytest.raises(ResultFilesError, match="hold 1 results of requests that are not in"):
            files.check_belongs({hash_id("a"): A.request_id}, tmp_path / "batch")


def test_a_request_with_two_results_is_named_and_both_stay(files, tmp_path) -> None:
    failed = build_error_line(B, "x", "y")
    files.output.write_bytes(answer(A) + answer(B))
    files.errors.write_bytes(failed)
    fault = r"err\.jsonl: line 1 is of a request with a result before it or in .*out\.jsonl: name"
    with pytest.raises(ResultFilesError, match=fault), files:
        pass
    assert files.errors.read_bytes() == failed
    with ResultFiles(files.output, tmp_path / "other.jsonl") as other:
        assert (other.num_succeeded, other.num_failed) == (2, 0)
    files.output.write_bytes(answer(A) + answer(A))
    again = ResultFiles(files.output, files.errors)
    with pytest.raises(ResultFilesError, match=r"out\.jsonl: line 2 .* before it: name"), again:
        pass


def test_a_folder_that_does_not_exist_is_named(tmp_path) -> None:
    files = ResultFiles(tmp_path / "none" / "out.jsonl", tmp_path / "err.jsonl")
    with pytest.raises(ResultFilesError, match="No such file"), files:
        pass
