import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.simulator.trace import Trace
from cleave.traffic import history
from cleave.traffic.recordings import request_table
from cleave.traffic.recordings.history_error import HistoryError

PLAIN = "arrival_s,prompt_tokens,output_tokens"


def fault(path: Path, content: str | bytes) -> str:
    """The one line about a file of this content, the folder left out."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(HistoryError) as caught:
        history.read_trace(path)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", ("2023-11-16 23:59:59.5000000", "2023-11-17")),
        (
            "timestamp,input_tokens,output_tokens",
            ("2024-05-10T00:00:00Z", "2024-05-10T00:00:00.5Z"),
        ),
        ("arrival_s,prompt_tokens,output_tokens", ("7.25", "7.75")),
        ("arrival_ms,Prompt Tokens,completion_tokens", ("1000", "1500")),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ("0", "0.5")),
        ("Timestamp,Request tokens,Response tokens", ("5", "5.5")),
        ("timestamp,input_length,output_length", ("27482", "27982")),
    ],
)
def test_columns_go_by_many_names_and_times_by_many_units(tmp_path, header, times) -> None:
    file = tmp_path / "trace.csv"
    first, second = times
    file.write_text(f"{header}\n{first},374,44\n{second},396,109\n")
    trace = history.read_trace(file)
    assert trace.arrival_ms.tolist() == [0, 500]
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]


def test_columns_may_stand_in_any_order_among_others(tmp_path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\ufeffoutput_tokens,model,arrival_s,prompt_tokens\n5,chat,0,7\n\n6,chat,1,8\n")
    trace = history.read_trace(file)
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([7, 8], [5, 6])


def test_json_lines_are_read_with_extra_fields(tmp_path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 3052, "input_length": 6472, "output_length": 26, "hash_ids": []},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = history.read_trace(file)
    assert trace.arrival_ms.tolist() == [0, 3052]
    assert trace.prompt_tokens.tolist() == [6955, 6472]


def test_json_lines_are_known_by_their_first_character_too(tmp_path) -> None:
    file = tmp_path / "requests.log"
    file.write_text('{"arrival_s": 1.5, "prompt_tokens": 3, "completion_tokens": 4}\n')
    assert history.read_trace(file).output_tokens.tolist() == [4]


def test_lengths_alone_arrive_at_once(tmp_path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens\n3,4\n5,6\n")
    trace = history.read_trace(file)
    assert trace.arrival_ms.tolist() == [0, 0]
    assert trace.rate == 0


def test_requests_may_arrive_together(tmp_path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"{PLAIN}\n1,3,4\n1,5,6\n2,5,6\n")
    assert history.read_trace(file).arrival_ms.tolist() == [0, 0, 1000]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nan,5,5", "trace.csv:3: arrival_s 'nan': not a number"),
        ("inf,5,5", "trace.csv:3: arrival_s 'inf': not a number"),
        ("soon,5,5", "trace.csv:3: arrival_s 'soon': not a number"),
        ("0,5,5", "trace.csv:3: '0' is before the request above; sort by arrival_s"),
        ("2,-5,5", "trace.csv:3: prompt_tokens '-5': must be a whole number from 1 to 10,000,000"),
        ("2,0,5", "trace.csv:3: prompt_tokens '0': must be a whole number from 1"),
        ("2,5.5,5", "trace.csv:3: prompt_tokens '5.5': must be a whole number"),
        ("2,5,", "trace.csv:3: output_tokens '': not a number"),
        ("2,5,1e99", "trace.csv:3: output_tokens '1e99': must be a whole number"),
        ("2,5", "trace.csv:3: has 2 of 3 fields: complete or drop it"),
        ("2,5,6,7", "trace.csv:3: has 4 of 3 fields"),
        ("2,5," + "x" * 1000, "trace.csv:3: output_tokens 'xxxx"),
    ],
)
def test_a_bad_line_is_reported_with_its_number_value_and_remedy(tmp_path, row, message) -> None:
    line = fault(tmp_path / "trace.csv", f"{PLAIN}\n1,5,5\n{row}\n9,5,5\n")
    assert line.startswith(message)
    assert len(line) < 200


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "trace.jsonl:2: not a JSON object: "),
        ("[1, 2]", "trace.jsonl:2: not a JSON object: [1, 2]"),
        ('{"arrival_s": 2, "prompt_tokens": 3}', "trace.jsonl:2: output_tokens None: not a number"),
        (
            '{"arrival_s": 2, "prompt_tokens": true, "output_tokens": 1}',
            "trace.jsonl:2: prompt_tokens True: not a number",
        ),
        (
            '{"arrival_s": 2, "prompt_tokens": [1], "output_tokens": 1}',
            "trace.jsonl:2: prompt_tokens [1]: not a number",
        ),
        ("[" * 100_000, "trace.jsonl:2: not a JSON object: "),
    ],
)
def test_a_bad_json_line_is_reported_with_its_number_value_and_remedy(
    tmp_path, row, message
) -> None:
    good = '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 2}'
    assert fault(tmp_path / "trace.jsonl", f"{good}\n{row}\n").startswith(message)


def test_inconsistent_dates_are_reported(tmp_path) -> None:
    header = "timestamp,prompt_tokens,output_tokens"
    for second in ("2024-05-10 10:00:00+00:00", "tomorrow"):
        line = fault(tmp_path / "t.csv", f"{header}\n2024-05-10 09:00:00,1,1\n{second},1,1\n")
        assert line == f"t.csv:3: {second!r}: no date and time as in line 2"


@pytest.mark.parametrize("content", ["", "\n", PLAIN, f"{PLAIN}\n\n"])
def test_an_empty_recording_is_refused(tmp_path, content) -> None:
    assert fault(tmp_path / "trace.csv", content).startswith("trace.csv: holds no requests")
    assert fault(tmp_path / "trace.jsonl", "\n").startswith("trace.jsonl: holds no requests")


def test_missing_columns_are_named_with_those_there_are(tmp_path) -> None:
    line = fault(tmp_path / "trace.csv", "arrival_s,size_in,output_tokens\n1,2,3\n")
    assert line == (
        "trace.csv: no column prompt_tokens (or a usual name for it) among "
        "'arrival_s', 'size_in', 'output_tokens'; rename one"
    )


def test_files_that_are_no_text_or_too_large_or_absent_are_refused(tmp_path, monkeypatch) -> None:
    assert "is not UTF-8 text; convert it" in fault(tmp_path / "trace.csv", b"\xff\xfe\x00\x01")
    assert "not CSV: " in fault(tmp_path / "trace.csv", f"{PLAIN}\n1,1,{'9' * 200_000}\n")
    with pytest.raises(HistoryError, match="No such file"):
        history.read_trace(tmp_path / "absent.csv")
    with pytest.raises(HistoryError, match="Is a directory"):
        history.read_trace(tmp_path)
    monkeypatch.setattr(request_table, "MAX_REQUESTS", 1)
    assert "holds over 1 requests" in fault(tmp_path / "trace.csv", f"{PLAIN}\n1,1,1\n2,1,1\n")
    monkeypatch.setattr(request_table, "MAX_BYTES", 10)
    assert "has over 0 MiB" in fault(tmp_path / "trace.csv", f"{PLAIN}\n1,1,1\n")


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1
    )
)
def test_what_is_written_is_read_again(tmp_path_factory, rows) -> None:
    gaps, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    arrivals = (np.cumsum(gaps) - gaps[0]) / 1000  # to the microsecond
    written = Trace(arrivals, prompts, outputs)
    file = tmp_path_factory.mktemp("trace") / "t.csv"
    history.write_trace(file, written)
    trace = history.read_trace(file)
    assert np.allclose(trace.arrival_ms, written.arrival_ms, atol=1e-6)
    assert np.array_equal(trace.prompt_tokens, prompts)
    assert np.array_equal(trace.output_tokens, outputs)


def test_a_trace_that_cannot_be_written_is_reported(tmp_path) -> None:
    trace = Trace(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(HistoryError, match="cannot be written"):
        history.write_trace(tmp_path / "absent" / "t.csv", trace)


@given(content=st.text(max_size=200))
def test_any_text_is_met_with_an_answer_or_one_line(tmp_path_factory, content) -> None:
    file = tmp_path_factory.mktemp("any") / "t.csv"
    file.write_text(f"{PLAIN}\n{content}", encoding="utf-8", errors="replace")
    message = ""
    try:
        history.read_trace(file)
    except HistoryError as error:
        message = str(error)
    assert "\n" not in message


def write_lines(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_line(hashes: object, tokens: int = 1000, **more: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": hashes} | more


def test_hashes_of_blocks_are_numbered_as_they_appear(tmp_path) -> None:
    file = tmp_path / "trace.jsonl"
    write_lines(file, build_line([70, 9]), build_line([70, 5]), build_line([70, 9]))
    blocks = history.read_trace(file).blocks
    assert blocks.block_tokens == 512
    assert blocks.count == 3
    assert blocks.starts.tolist() == [0, 2, 4, 6]
    assert blocks.numbers.tolist() == [0, 1, 0, 2, 0, 1]


def test_hashes_may_be_strings_of_blocks_of_another_length(tmp_path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        build_line(["a", "b"], 32, hash_block_tokens=16),
        build_line([], 32, hash_block_tokens=16),
    ]
    blocks = history.read_trace(write_lines(file, *lines)).blocks
    assert blocks.block_tokens == 16
    assert blocks.starts.tolist() == [0, 2, 2]


def test_a_trace_without_hashes_has_no_blocks(tmp_path) -> None:
    file = write_lines(tmp_path / "trace.jsonl", build_line([]))
    assert history.read_trace(file).blocks is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([build_line([1, 2]), build_line(7)], ":2: hash_ids 7: must be a list of numbers or texts"),
        ([build_line([1, None])], ":1: hash_ids [1, None]: must be a list of numbers or texts"),
        ([build_line([1, 2, 3])], ":1: hash_ids has 3 hashes, more than 1000 prompt tokens have"),
        (
            [build_line([1, 2]), build_line([3, 2])],
            ":2: hash_ids[1] 2 is the hash of another block in line 1; hash each block together",
        ),
        (
            [build_line([1, 2], 1000), build_line([1, 2], 900)],
            ":2: hash_ids[1] 2 is the hash of another block in line 1",
        ),
        (
            [build_line([1], hash_block_tokens=512), build_line([1], hash_block_tokens=16)],
            ":2: hash_block_tokens 16: must be 512 as in the lines above; hash all alike",
        ),
    ],
)
def test_hashes_that_no_recording_has_are_reported(tmp_path, lines, message) -> None:
    file = tmp_path / "trace.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    assert fault(file, text).startswith(f"trace.jsonl{message}")
