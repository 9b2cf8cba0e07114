"""The same requests, as many tools write them: all files bring the same trace, or are refused."""

import csv
import io
import json
import re
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.simulator.trace import Trace
from cleave.traffic import history
from cleave.traffic.recordings.history_error import HistoryError

START = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
"""Of recordings with clock times."""


class Request(NamedTuple):
    """What all formats say of a request; served, unless `output` is 0."""

    at_ms: int
    """Since the start of the recording."""
    prompt: int
    output: int

    @property
    def is_failed(self) -> bool:
        return self.output == 0

    @property
    def date(self) -> datetime:
        return START + timedelta(milliseconds=self.at_ms)

    def count(self, per_s: int) -> int:
        """Units since 1970, in whole numbers."""
        return round(START.timestamp()) * per_s + self.at_ms * per_s // 1000


Write = Callable[[Sequence[Request]], str]


def write_csv(header: str, rows: list[tuple[object, ...]], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(header.split(","))
    writer.writerows(rows)
    return text.getvalue()


def write_lines(records: list[dict]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


def write_clock_csv(name: str, per_s: int) -> Write:
    return lambda requests: write_csv(
        f"{name},prompt_tokens,output_tokens",
        [(each.count(per_s), each.prompt, each.output) for each in requests],
    )


def write_offset_csv(name: str, per_ms: float) -> Write:
    return lambda requests: write_csv(
        f"model,{name},input_tokens,completion_tokens",
        [("m", f"{each.at_ms * per_ms:.6f}", each.prompt, each.output) for each in requests],
    )


def write_azure(requests: Sequence[Request]) -> str:
    rows = [(f"{each.date:%Y-%m-%d %H:%M:%S.%f}0", *each[1:]) for each in requests]
    return write_csv("TIMESTAMP,ContextTokens,GeneratedTokens", rows)


def write_burst(requests: Sequence[Request]) -> str:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [(e.at_ms / 1000, "M", *e[1:], sum(e[1:]), "API log") for e in requests]
    return write_csv(header, rows)


def write_mooncake(requests: Sequence[Request]) -> str:
    return write_lines(
        [
            {"timestamp": each.at_ms, "input_length": each.prompt, "output_length": each.output}
            for each in requests
        ]
    )


def build_plain(each: Request) -> dict:
    return {"arrival_ms": each.at_ms, "prompt_tokens": each.prompt, "output_tokens": each.output}


def write_vllm_bench(requests: Sequence[Request]) -> str:
    """`vllm bench serve --save-result --save-detailed`: clock of the process, 0 where it failed."""
    result = {
        "date": "20260301-123000",
        "num_prompts": len(requests),
        "request_rate": "inf",
        "total_input_tokens": sum(each.prompt for each in requests),
        "input_lens": [each.prompt for each in requests],
        "output_lens": [each.output for each in requests],
        "ttfts": [0.1] * len(requests),
        "itls": [[0.01, 0.02]] * len(requests),
        "start_times": [7000 + each.at_ms / 1000 for each in requests],
        "errors": ["Bad Gateway" if each.is_failed else "" for each in requests],
    }
    return json.dumps(result)


def build_aiperf(each: Request) -> dict:
    metrics = {
        "input_sequence_length": {"value": each.prompt, "unit": "tokens"},
        "time_to_first_token": {"value": 12.5, "unit": "ms"},
        "output_token_count": {"value": each.output - 1, "unit": "tokens"},
        "output_sequence_length": {"value": each.output, "unit": "tokens"},
    }
    failed = {"error_isl": {"value": each.prompt, "unit": "tokens"}}
    times = {"request_start_ns": each.count(10**9), "request_end_ns": each.count(10**9) + 10**9}
    return {
        "metadata": {**times, "session_num": 1, "was_cancelled": False},
        "metrics": failed if each.is_failed else metrics,
        "error": {"code": 499, "type": "E"} if each.is_failed else None,
    }


def write_guidellm(requests: Sequence[Request]) -> str:
    records = [
        {
            "type_": "generative_request_stats",
            "request_args": {"prompt": "text"},
            "info": {"timings": {"request_start": each.count(1000) / 1000, "resolve_start": 1.0}},
            "input_metrics": {"text_tokens": each.prompt},
            "request_start_time": each.count(1000) / 1000,
            "request_end_time": each.count(1000) / 1000 + 2,
            "prompt_tokens": each.prompt,
            "output_tokens": None if each.is_failed else each.output,
        }
        for each in requests
    ]
    served = [r for r, each in zip(records, requests, strict=True) if not each.is_failed]
    failed = [r for r, each in zip(records, requests, strict=True) if each.is_failed]
    groups = {"successful": served, "incomplete": [], "errored": failed}
    benchmark = {
        "metrics": {"prompt_token_count": {"mean": 5.0}},
        "request_totals": {"successful": len(served), "errored": len(failed)},
        "requests": groups,
    }
    return json.dumps({"args": {"target": "x"}, "benchmarks": [benchmark]}, indent=1)


def build_openai(each: Request) -> dict:
    usage = {
        "prompt_tokens": each.prompt,
        "completion_tokens": each.output,
        "total_tokens": each.prompt + each.output,
        "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": 0},
    }
    return {"id": "x", "object": "chat.completion", "created": each.count(1), "usage": usage}


def build_responses(each: Request) -> dict:
    usage = {
        "input_tokens": each.prompt,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": each.output,
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    status = "failed" if each.is_failed else "incomplete"
    error = {"code": "server_error"} if each.is_failed else None
    return {"created_at": each.count(1), "status": status, "error": error, "usage": usage}


def build_anthropic(each: Request) -> dict:
    cached = each.prompt // 2
    usage = {
        "input_tokens": each.prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": each.output,
    }
    return {"timestamp": each.date.isoformat(), "message": {"usage": usage, "type": "message"}}


def build_litellm(each: Request) -> dict:
    return {
        "request_id": "x",
        "status": "failure" if each.is_failed else "success",
        "startTime": each.count(1000) / 1000,
        "endTime": each.count(1000) / 1000 + 3,
        "completionStartTime": each.count(1000) / 1000 + 1,
        "prompt_tokens": 0 if each.is_failed else each.prompt,
        "completion_tokens": each.output,
        "metadata": {"usage_object": {"prompt_tokens": 0 if each.is_failed else each.prompt}},
        "error_information": {"error_code": "500" if each.is_failed else ""},
    }


def build_langfuse(each: Request) -> dict:
    usage = {"input": each.prompt - 1, "input_cached_tokens": 1, "output": each.output}
    return {
        "type": "GENERATION",
        "startTime": each.date.isoformat().replace("+00:00", "Z"),
        "level": "ERROR" if each.is_failed else "DEFAULT",
        "usageDetails": {**usage, "total": each.prompt + each.output},
        "promptTokens": each.prompt,
        "completionTokens": each.output,
        "metadata": {"created_at": "yesterday"},
    }


def write_langfuse(requests: Sequence[Request]) -> str:
    """An export has the newest first, and observations that are no calls of a model."""
    span = {"type": "SPAN", "startTime": START.isoformat(), "usageDetails": {}, "promptTokens": 0}
    return json.dumps([*map(build_langfuse, reversed(requests)), span], indent=2)


def write_langfuse_csv(requests: Sequence[Request]) -> str:
    rows = [
        (f"{e.date:%Y-%m-%d %H:%M:%S.%f}", json.dumps({"input": e.prompt, "output": e.output}))
        for e in requests
    ]
    return write_csv("start_time,usage_details", rows)


def build_access_log(each: Request) -> dict:
    return {
        "time": each.date.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": "info",
        "logger": "cleave.access",
        "status": 502 if each.is_failed else 200,
        "outcome": "failed" if each.is_failed else "ok",
        "prompt_tokens": each.prompt,
        "output_tokens": each.output,
        "duration_ms": 5.0,
    }


def build_span(each: Request) -> dict:
    return {
        "startTimeUnixNano": str(each.count(10**9)),
        "attributes": {
            "gen_ai.usage.input_tokens": each.prompt,
            "gen_ai.usage.output_tokens": each.output,
        },
    }


def build_gemini(each: Request) -> dict:
    counts = {
        "promptTokenCount": each.prompt - 2,
        "toolUsePromptTokenCount": 2,
        "candidatesTokenCount": each.output - 1,
        "thoughtsTokenCount": 1,
        "cachedContentTokenCount": 1,
    }
    return {"logging_time": each.count(10**3), "full_response": {"usageMetadata": counts}}


def write_names(arrival: str, prompt: str, output: str) -> Write:
    return lambda requests: write_csv(
        f"{arrival},{prompt},{output}",
        [(each.count(10**3), each.prompt, each.output) for each in requests],
    )


def write_each(build: Callable[[Request], dict]) -> Write:
    return lambda requests: write_lines([build(each) for each in requests])


def write_page(requests: Sequence[Request]) -> str:
    return json.dumps({"meta": {"page": 1, "count": 2}, "data": [*map(build_plain, requests)]})


def write_lists(requests: Sequence[Request]) -> str:
    records = [*map(build_plain, requests)]
    return json.dumps({name: [each[name] for each in records] for name in records[0]})


FORMATS: dict[str, tuple[str, Write]] = {
    "seconds": ("csv", write_offset_csv("arrival_s", 0.001)),
    "milliseconds": ("csv", write_offset_csv("arrival_ms", 1)),
    "microseconds": ("csv", write_offset_csv("Arrival (us)", 1000)),
    "nanoseconds": ("csv", write_offset_csv("start_time_ns", 1_000_000)),
    "epoch_ms": ("csv", write_clock_csv("timestamp", 10**3)),
    "epoch_us": ("csv", write_clock_csv("arrived_at", 10**6)),
    "epoch_ns": ("csv", write_clock_csv("time", 10**9)),
    "epoch_named": ("csv", write_clock_csv("created_unix_ms", 10**3)),
    "epoch_misnamed": ("csv", write_clock_csv("arrival_s", 10**3)),
    "semicolons": ("csv", lambda all_: write_offset_csv("arrival_ms", 1)(all_).replace(",", ";")),
    "tabs": ("tsv", lambda all_: write_offset_csv("arrival_ms", 1)(all_).replace(",", "\t")),
    "bom": ("csv", lambda all_: "\ufeff" + write_offset_csv("arrival_s", 0.001)(all_)),
    "azure": ("csv", write_azure),
    "burst": ("csv", write_burst),
    "mooncake": ("jsonl", write_mooncake),
    "lines": ("jsonl", write_each(build_plain)),
    "array": ("json", lambda all_: json.dumps([*map(build_plain, all_)])),
    "indented": ("json", lambda all_: json.dumps([*map(build_plain, all_)], indent=2)),
    "bom_array": ("log", lambda all_: "\ufeff" + json.dumps([*map(build_plain, all_)], indent=2)),
    "page": ("json", write_page),
    "lists": ("json", write_lists),
    "vllm_bench": ("json", write_vllm_bench),
    "aiperf": ("jsonl", write_each(build_aiperf)),
    "guidellm": ("json", write_guidellm),
    "anthropic": ("jsonl", write_each(build_anthropic)),
    "litellm": ("jsonl", write_each(build_litellm)),
    "langfuse": ("json", write_langfuse),
    "langfuse_csv": ("csv", write_langfuse_csv),
    "access_log": ("log", write_each(build_access_log)),
    "span": ("jsonl", write_each(build_span)),
    "gemini": ("jsonl", write_each(build_gemini)),
    "openrouter": ("csv", write_names("created_at", "tokens_prompt", "tokens_completion")),
    "portkey": ("csv", write_names("created_at", "req_units", "res_units")),
    "cloudflare": ("csv", write_names("created_at", "tokens_in", "tokens_out")),
    "phoenix": (
        "csv",
        write_names("start_time", "llm.token_count.prompt", "llm.token_count.completion"),
    ),
}
WHOLE_SECONDS = {
    "openai": ("jsonl", write_each(build_openai)),
    "responses": ("jsonl", write_each(build_responses)),
    "openai_array": ("json", lambda all_: json.dumps([*map(build_openai, all_)])),
}
"""Formats whose times have no fractions."""


def read(folder: Path, name: str, ending: str, text: str) -> Trace:
    file = folder / f"{name}.{ending}"
    file.write_text(text, encoding="utf-8")
    return history.read_trace(file)


def check(trace: Trace, requests: Sequence[Request], name: str) -> None:
    served = [each for each in requests if not each.is_failed]
    arrivals = np.array([each.at_ms - served[0].at_ms for each in served], float)
    assert np.allclose(trace.arrival_ms, arrivals, atol=0.01), name
    assert trace.prompt_tokens.tolist() == [each.prompt for each in served], name
    assert trace.output_tokens.tolist() == [each.output for each in served], name
    failed = len(requests) - len(served)
    if failed and name != "guidellm" and name != "langfuse":
        assert any(f"{failed:,} of {len(requests):,} requests failed" in r for r in trace.remarks)


def build_requests(rows: list[tuple[int, int, int]], step_ms: int) -> list[Request]:
    requests, at_ms = [], 0
    for gap, prompt, output in rows:
        at_ms += (gap + 1) * step_ms
        requests.append(Request(at_ms, prompt, output))
    return requests


ROWS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(2, 100_000), st.integers(0, 3000)),
    min_size=1,
    max_size=12,
).filter(lambda rows: any(output for _, _, output in rows))


@settings(max_examples=8)
@given(rows=ROWS)
def test_the_same_requests_are_read_from_all_formats(tmp_path_factory, rows) -> None:
    folder = tmp_path_factory.mktemp("formats")
    requests = build_requests(rows, 1)
    for name, (ending, write) in FORMATS.items():
        check(read(folder, name, ending, write(requests)), requests, name)
    requests = build_requests(rows, 1000)
    for name, (ending, write) in {**FORMATS, **WHOLE_SECONDS}.items():
        check(read(folder, name, ending, write(requests)), requests, name)


def fault(folder: Path, name: str, text: str) -> str:
    """The one line about a file of this content, the folder left out."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(HistoryError) as caught:
        history.read_trace(file)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


TWO = [Request(0, 10, 5), Request(700, 20, 6)]
BENCH = json.loads(write_vllm_bench(TWO))
GUIDELLM = json.loads(write_guidellm(TWO))["benchmarks"][0]
REFUSED = {
    "texts": (
        [{"id": "a", "conversations": [{"from": "human", "value": "hi"}]}],
        "no column prompt_tokens .* 'id', 'conversations'; texts are not counted",
    ),
    "batch_input": (
        {"custom_id": "1", "method": "POST", "body": {"messages": [], "max_tokens": 5}},
        "texts are not counted: count tokens with the model's tokenizer",
    ),
    "genai_perf": (
        {"experiments": [{"requests": [{"timestamp": 1, "request_inputs": {"payload": "x"}}]}]},
        "no column prompt_tokens .* 'experiments'",
    ),
    "summary": (
        {key: value for key, value in BENCH.items() if not isinstance(value, list)},
        "write the details of each request, not a summary",
    ),
    "aiperf_summary": (
        {"input_sequence_length": {"unit": "tokens", "avg": 5.0}, "output_sequence_length": {}},
        "write the details of each request, not a summary",
    ),
    "usage_buckets": (
        {"data": [{"results": [{"input_tokens": 9, "output_tokens": 9, "num_model_requests": 5}]}]},
        "request 1: num_model_requests 5: sums requests up; write one line for each request",
    ),
    "usage_pages": (
        {"data": [{"results": [{"input_tokens": 9, "output_tokens": 9, "num_requests": 5}]}] * 2},
        "sums requests up, in several lists; write one JSON object for each request",
    ),
    "values": (
        {"a": {"arrival_s": {"0": 1}, "prompt_tokens": {"0": 1}, "output_tokens": {"0": 1}}},
        "no column prompt_tokens .* 'a.prompt_tokens.0'",
    ),
    "levels": (
        {"benchmarks": [GUIDELLM, GUIDELLM]},
        r"holds 2 lists of requests \(.benchmarks\[0\].requests.successful, .*jq",
    ),
    "part": (
        {"benchmarks": [{**GUIDELLM, "request_totals": {"successful": 999}}]},
        r"holds 2 of 999 requests \(request_totals\)",
    ),
    "uneven": ({**BENCH, "output_lens": [1]}, "input_lens has 2 values and output_lens 1"),
    "contradiction": (
        [{"prompt_tokens": 5, "usage": {"prompt_tokens": 6, "completion_tokens": 1}}],
        "request 1: prompt_tokens 5 and usage.prompt_tokens 6 contradict each other; drop one",
    ),
    "characters": (
        [{"usage": {"input": 5, "output": 6, "unit": "CHARACTERS"}}],
        "usage.unit 'CHARACTERS': must be tokens",
    ),
    "mixed": ([{"prompt_tokens": 5, "output_tokens": 1}, 7], "request 2 is not a JSON object: 7"),
    "no_time_once": (
        [build_plain(TWO[0]), {"prompt_tokens": 5, "output_tokens": 6}],
        "request 2: arrival_ms None: not a number; drop or correct",
    ),
    "stream_without_usage": (
        [build_openai(TWO[0]), {"created": 1_790_000_000, "usage": None}],
        "request 2: usage.prompt_tokens None: not a number; drop or correct the request",
    ),
    "all_failed": (
        [{"prompt_tokens": 5, "output_tokens": 0}] * 3,
        r"3 of 3 requests failed or generated nothing \(3 with output_tokens 0\); record",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_with_what_to_write(tmp_path, name) -> None:
    document, message = REFUSED[name]
    for indent in (None, 2):
        line = fault(tmp_path, "t.json", json.dumps(document, indent=indent))
        assert re.search(message, line), line


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (
            "timestamp",
            ("5e12", "6e12"),
            "timestamp '6e12': neither surely times since 1970 in one unit",
        ),
        (
            "timestamp",
            ("1790000000", "1790000000000"),
            "'1790000000000': neither surely times since",
        ),
        ("timestamp", ("0", "900000000"), "'900000000': neither .* arrival_s, arrival_ms, arrival"),
        ("arrival_s", ("0", "6e12"), "arrival_s '6e12': neither"),
        ("arrival_ms", ("1790000000", "1790000005"), "neither surely .* and let it begin at 0"),
        ("timestamp", tuple(str(500 * at) for at in range(30)), "timestamp '14500': may be"),
        # A request in 5 seconds, or 200 a second in milliseconds.
        (
            "arrival",
            tuple(str(5 * at) for at in range(30)),
            "arrival '145': may be .* arrival_ms",
        ),
        (
            "time",
            tuple(f"{5.37 * at:.2f}" for at in range(30)),
            "time '155.73': may be .* arrival_ms",
        ),
        ("timestamp", ("1 May 2026", "2 May 2026"), "timestamp '1 May 2026': not a number"),
        (
            "timestamp",
            tuple(f"{46235.375 + at / 86400:.10f}" for at in range(30)),
            "timestamp '46235.3753.*': is a date of a spreadsheet, in days; write dates as",
        ),
        ("num_requests", ("1", "3"), "t.csv:3: num_requests '3': sums requests up"),
        ("output_tokens", ("1", "1"), "has two columns 'output_tokens'; rename or drop one"),
    ],
)
def test_columns_that_fit_no_unit_are_refused(tmp_path, header, rows, message) -> None:
    text = write_csv(f"{header},prompt_tokens,output_tokens", [(each, 5, 6) for each in rows])
    assert re.search(message, fault(tmp_path, "t.csv", text))


@pytest.mark.parametrize(
    ("header", "rows", "remark"),
    [
        (
            "timestamp",
            ("1790000000500", "1790000001000"),
            "timestamp is read as milliseconds since 1970: the first request arrived at 2026-09-21",
        ),
        ("timestamp", ("0", "5"), "timestamp is read as seconds, since its name has no unit; if"),
        (
            "arrival_s",
            ("1790000000500", "1790000001000"),
            "arrival_s is read as milliseconds since 1970",
        ),
        ("start_s", ("9", "2"), "1 requests were not in order of start_s: all are sorted"),
        ("time", ("2026-05-02", "2026-05-01"), "1 requests were not in order of time: all are"),
        ("created,start_time", ("1,2", "3,4"), "requests arrived at start_time, not at created"),
    ],
)
def test_what_is_assumed_is_a_remark(tmp_path, header, rows, remark) -> None:
    text = f"{header},prompt_tokens,output_tokens\n" + "".join(f"{each},5,6\n" for each in rows)
    trace = read(tmp_path, "t", "csv", text)
    assert any(each.startswith(remark) for each in trace.remarks), trace.remarks


def test_bailians_traces_are_in_seconds_and_their_blocks_have_16_tokens(tmp_path) -> None:
    # As github.com/alibaba-edu/qwen-bailian-usagetraces-anon has them.
    rows = [
        {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 41,
         "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 6326]},
        {"chat_id": 160, "parent_chat_id": -1, "timestamp": 62.5, "input_length": 20,
         "output_length": 8, "type": "search", "turn": 1, "hash_ids": [7, 8]},
    ]  # fmt: skip
    trace = read(tmp_path, "t", "jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert trace.arrival_ms.tolist() == pytest.approx([0, 1386])
    assert trace.blocks.block_tokens == 16
    assert trace.remarks[0].startswith("timestamp is read as seconds, as in Bailian's traces")


def test_requests_of_several_models_are_a_remark(tmp_path) -> None:
    rows = [
        {"arrival_s": at, "model": f"m{at % 2}", "prompt_tokens": 5, "output_tokens": 6}
        for at in range(3)
    ]
    for count, remarks in ((1, ()), (3, ("model names 2 models ('m0' 2, 'm1' 1): requests of",))):
        text = "".join(json.dumps(row) + "\n" for row in rows[:count])
        trace = read(tmp_path, "t", "jsonl", text)
        assert len(trace.remarks) == len(remarks)
        assert all(map(str.startswith, trace.remarks, remarks))


def test_whole_seconds_of_burstgpt_are_seconds(tmp_path) -> None:
    rows = [(5 * at, 7, 8) for at in range(30)]
    text = write_csv("Timestamp,Request tokens,Response tokens", rows)
    trace = read(tmp_path, "t", "csv", text)
    assert trace.arrival_ms[-1] == 145_000
    assert trace.remarks[0].startswith("Timestamp is read as seconds, as in BurstGPT's traces")


def test_nanoseconds_that_could_be_seconds_since_1970_keep_their_unit(tmp_path) -> None:
    rows = [(10**9, 5, 6), (10**9 + 200_000_000, 5, 6)]
    for count in (1, 2):
        text = write_csv("arrival_ns,prompt_tokens,output_tokens", rows[:count])
        trace = read(tmp_path, "t", "csv", text)
        assert trace.arrival_ms.tolist() == pytest.approx([0, 200][:count])


@pytest.mark.parametrize(
    ("header", "cells", "failed"),
    [
        ("status", ("200", "500", "429", "success", "FAILED"), 3),
        ("finish_reason", ("stop", "length", "abort", "error", "tool_calls"), 2),
        ("error", ("", "None", "timeout", "0", "x"), 2),
        ("success", ("true", "False", "0", "1", ""), 2),
        ("was_cancelled", ("true", "False", "0", "1", ""), 2),
    ],
)
def test_failed_requests_are_left_out_and_counted(tmp_path, header, cells, failed) -> None:
    text = write_csv(f"{header},prompt_tokens,output_tokens", [(each, 5, 6) for each in cells])
    trace = read(tmp_path, "t", "csv", text)
    assert len(trace) == 5 - failed
    (remark,) = trace.remarks
    assert remark.startswith(f"{failed} of 5 requests failed or generated nothing ({failed} by")


def test_a_status_that_is_not_known_is_mentioned(tmp_path) -> None:
    text = "status,prompt_tokens,output_tokens\nodd,5,6\nok,7,8\n"
    trace = read(tmp_path, "t", "csv", text)
    assert len(trace) == 2
    assert trace.remarks == (
        "status 'odd' is not known to be a failure: 1 such requests count as served",
    )


def test_hashes_may_begin_in_a_later_line_or_stand_in_csv(tmp_path) -> None:
    lines = [{"timestamp": 0, "input_length": 900, "output_length": 1}]
    lines += [{**lines[0], "hash_ids": [4, 7]}, {**lines[0], "hash_ids": [4, 7]}]
    trace = read(tmp_path, "t", "jsonl", write_lines(lines))
    assert trace.blocks.starts.tolist() == [0, 0, 2, 4]
    assert "1 of 3 requests have no hash_ids: nothing of them repeats" in trace.remarks
    rows = [(line["timestamp"], 900, 1, line.get("hash_ids", "")) for line in lines]
    text = write_csv("timestamp,input_length,output_length,hash_ids", rows)
    assert read(tmp_path, "t", "csv", text).blocks.numbers.tolist() == [0, 1, 0, 1]


def test_texts_beside_the_tokens_do_not_stay_in_memory(tmp_path) -> None:
    file = tmp_path / "t.jsonl"
    record = {"messages": [{"content": "x" * 100_000}], "arrival_s": 1}
    line = json.dumps({**record, "prompt_tokens": 5, "output_tokens": 6})
    file.write_text(f"{line}\n" * 200)
    tracemalloc.start()
    try:
        assert len(history.read_trace(file)) == 200
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


NAMES = st.sampled_from(
    ["prompt_tokens", "output_tokens", "usage", "timestamp", "status", "data", "value", "hash_ids"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
DOCUMENTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=12
)


@settings(max_examples=100)
@given(document=DOCUMENTS, indent=st.sampled_from([None, 1]))
def test_any_document_is_read_or_refused_in_one_line(tmp_path_factory, document, indent) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps(document, indent=indent))
    message = ""
    try:
        trace = history.read_trace(file)
    except HistoryError as error:
        message = str(error)
    else:
        assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1
    assert "\n" not in message
