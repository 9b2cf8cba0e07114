"""The file of a batch: what is read from it, and all that is wrong with it at once."""

import json

import pytest

from cleave.batch import batch_file
from cleave.batch.batch_file import BatchFileError, check_batch, parse_line, read_lines

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}


def write(tmp_path, *lines: object):
    path = tmp_path / "batch.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_line_becomes_a_request_that_fills_idle_capacity() -> None:
    line = parse_line(json.dumps(LINE).encode(), 3)
    assert (line.number, line.custom_id, line.path) == (3, "a", "/v1/chat/completions")
    assert json.loads(line.body) == BODY | {"service_tier": "flex"}
    assert line.request_id == parse_line(json.dumps(LINE).encode(), 9).request_id
    others = ({"custom_id": "b"}, {"url": "/v1/responses"}, {"body": BODY | {"seed": 1}})
    ids = {parse_line(json.dumps(LINE | other).encode(), 3).request_id for other in others}
    assert len(ids - {line.request_id}) == 3


def test_a_tier_that_the_file_names_stays() -> None:
    body = BODY | {"service_tier": "default"}
    line = parse_line(json.dumps(LINE | {"body": body}).encode(), 1)
    assert json.loads(line.body)["service_tier"] == "default"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1: input data was truncated"),
        ("[]", "line 1: expected `object`, got `array`"),
        (b"\xff", "line 1: JSON is malformed"),
        (LINE | {"custom_id": 7}, "line 1: custom_id: expected `str`, got `int`"),
        (LINE | {"custom_id": ""}, "line 1: custom_id: expected `str` of length >= 1"),
        (LINE | {"method": "GET"}, "line 1: method: invalid enum value 'GET'"),
        (LINE | {"url": "/v1/files"}, "line 1: url: '/v1/files' must be one of /v1/chat/comp"),
        (LINE | {"body": BODY | {"stream": True}}, "line 1: body.stream: results are not streamed"),
        (LINE | {"body": {}}, "line 1: body.model: required"),
        ({"custom_id": "a"}, "line 1: object missing required field `url`"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line, fault) -> None:
    raw = line if isinstance(line, bytes) else line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(ValueError, match="line 1") as caught:
        parse_line(raw if isinstance(raw, bytes) else raw.encode(), 1)
    assert str(caught.value).lower().startswith(fault.lower())


def test_all_faults_are_found_before_anything_is_sent(tmp_path) -> None:
    path = write(tmp_path, LINE, "{", LINE | {"custom_id": "b"}, LINE)
    with pytest.raises(BatchFileError) as caught:
        check_batch(path)
    assert caught.value.faults == [
        f"{path}: line 2: input data was truncated",
        f"{path}: line 4: custom_id: 'a' stands in line 1 already",
    ]


def test_no_more_faults_are_listed_than_a_screen_takes(tmp_path) -> None:
    with pytest.raises(BatchFileError) as caught:
        check_batch(write(tmp_path, *["{"] * 100))
    assert len(caught.value.faults) == batch_file.MAX_FAULTS + 1
    assert caught.value.faults[-1].endswith("further lines were not checked")


def test_blank_lines_do_not_count_as_requests(tmp_path) -> None:
    path = write(tmp_path, "", LINE, "  ", LINE | {"custom_id": "b"})
    assert len(check_batch(path)) == 2
    assert [(line.number, line.custom_id) for line in read_lines(path)] == [(2, "a"), (4, "b")]


def test_the_number_and_the_length_of_lines_are_limited(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINES", 2)
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 400)
    many = [LINE | {"custom_id": name} for name in "abc"]
    with pytest.raises(BatchFileError, match="more than 2 lines: split it"):
        check_batch(write(tmp_path, *many))
    long = LINE | {"body": BODY | {"user": "x" * 1_000}}
    with pytest.raises(BatchFileError) as caught:
        check_batch(write(tmp_path, long, LINE | {"custom_id": "b"}))
    assert [fault.partition(": ")[2] for fault in caught.value.faults] == [
        "line 1: longer than 0 MiB: shorten it"
    ], "the rest of a long line is no line of its own"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_requests_is_refused(tmp_path, text) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(text)
    with pytest.raises(BatchFileError, match="holds no request"):
        check_batch(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(BatchFileError, match=r"none.jsonl: No such file"):
        check_batch(tmp_path / "none.jsonl")


def test_a_file_that_has_changed_since_it_was_checked_is_noticed(tmp_path) -> None:
    with pytest.raises(BatchFileError, match="has changed: line 1"):
        list(read_lines(write(tmp_path, "{")))
