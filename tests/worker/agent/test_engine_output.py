"""What an engine does and why it ended; what vLLM 0.32 printed, shortened."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from cleave_worker.agent import subreaper
from cleave_worker.agent.engine_output import CASCADE_S, ExitReason, StartStage
from cleave_worker.agent.launch import Launch
from cleave_worker.agent.process import EngineProcess

WORKER_KILLED = """
(EngineCore pid=7) INFO 11-22 07:52:41 [core.py:102] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 11-22 07:52:58 [multiproc_executor.py:315] Worker proc VllmWorker-0 \
died unexpectedly (exit code: -4), shutting down executor.
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512]     raise RuntimeError("cancelled")
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512] RuntimeError: cancelled
(APIServer pid=5) INFO 11-22 07:52:59 [core_client.py:777] [shutdown] MPClient: complete
  warnings.warn('resource_tracker: There appear to be %d '
"""
CHAINED = """
(APIServer pid=5) WARNING 11-22 07:57:22 [utils.py:255] this can cause OSError: Too many open files
Traceback (most recent call last):
httpcore2.ConnectError: [Errno -2] Name or service not known

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
OSError: We couldn't connect to the hub to load the files
"""
FIELD = """
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (999999) is greater than 8192 [type=value_error]
    For further information visit the manual
"""
FLAG = """
                    [--jit-monitor-mode {error,warn}]
api_server.py: error: unrecognized arguments: --bogus
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (WORKER_KILLED, "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting"),
        (CHAINED, "OSError: We couldn't connect to the hub to load the files"),
        (FIELD, "Value error, User-specified max_model_len (999999) is greater than 8192"),
        (FLAG, "api_server.py: error: unrecognized arguments: --bogus"),
        ("loading\nKilled\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_cause_is_reported_and_not_what_follows_from_it(output: str, cause: str) -> None:
    words = ExitReason({}, clock=lambda: 0.0)
    for line in output.split("\n"):
        words.feed(line)
    assert words.describe().startswith(cause)
    assert cause or not words.describe()


def test_an_error_of_long_ago_is_not_the_cause() -> None:
    now = 0.0
    words = ExitReason({}, clock=lambda: now)
    words.feed("ValueError: of one request")
    now = CASCADE_S + 1
    words.feed("stopping")
    assert words.describe() == "stopping"
    words.feed("RuntimeError: of the engine")
    assert words.describe() == "RuntimeError: of the engine"


@pytest.mark.parametrize("padding", ["", "x" * 280])
def test_no_secret_of_its_environment_is_reported(padding: str) -> None:
    words = ExitReason({"HF_TOKEN": "hf_abcdefgh", "HOME": "/home/me", "API_KEY": "1"})
    words.feed(f"OSError: {padding} 401 for hf_abcdefgh of /home/me, 1 time")
    assert "hf_" not in words.describe()
    assert words.describe().startswith(f"OSError: {padding}")
    assert padding or words.describe() == "OSError:  401 for *** of /home/me, 1 time"


@pytest.mark.parametrize(
    ("env", "argv", "said"),
    [
        ({}, (), "cannot reach http://me:hidden99@proxy:3128/"),
        ({"PGPASSWD": "hidden99"}, (), "no hidden99"),
        ({"REDIS_PWD": "hidden99"}, (), "no hidden99"),
        ({"BASIC_AUTH": "hidden99"}, (), "no hidden99"),
        ({"A_KEY": "prefix", "B_KEY": "prefixhidden99"}, (), "no prefixhidden99"),
        ({}, ("--api-key", "first1", "hidden99", "--port", "1"), "no hidden99"),
        ({}, ("--hf-token=hidden99",), "no hidden99"),
    ],
)
def test_no_secret_of_its_arguments_or_of_a_url_is_reported(env, argv, said: str) -> None:
    words = ExitReason(env, argv)
    words.feed(f"OSError: {said}")
    assert "hidden99" not in words.describe()
    assert "***" in words.describe()


def test_folders_and_what_is_no_secret_are_reported() -> None:
    words = ExitReason({"PWD": "/models"}, ("--max-num-batched-tokens", "123456"))
    words.feed("OSError: /models/a: 123456, see https://host/a@b")
    assert words.describe() == "OSError: /models/a: 123456, see https://host/a@b"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("AttributeError: 'int' object has no attribute 'get'",) * 2,
        ("ValueError: cannot read 'tell me a secret'", "ValueError: cannot read ..."),
        ('ValueError: "it is" is no token', "ValueError: ... is no token"),
        ("KeyError: 'a long prompt without its end", "KeyError: ..."),
        (f"KeyError: '{'word' * 30}'", "KeyError: ..."),
        ("ValueError: tokens [12, 7, 3, 99, 4] of 3", "ValueError: tokens ..."),
        ("OSError: couldn't connect to 'https://host/a' to load the files",) * 2,
        ("ValueError: a shape of [1, 2, 3]",) * 2,
    ],
)
def test_no_prompt_that_an_error_quotes_is_reported(error: str, said: str) -> None:
    words = ExitReason({})
    words.feed(error)
    assert (words.describe(), words.fault) == (said, said)


RECORD = "(EngineCore pid=2) INFO 11-23 05:30:03 [core.py:133] "
START = (
    ("model-00001-of-00004.safetensors:  61%|######1   | 3.0G/4.9G", "downloads the model"),
    ("Fetching 4 files:  25%|##5       | 1/4 [00:11<00:33]", "downloads the model, 20 %"),
    ("model-00002-of-00004.safetensors:   1%|          | 0.1G/4.9G", "downloads the model, 20 %"),
    (f"{RECORD}Starting to load model /models/llama-8b...", "loads weights"),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?]", "loads weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 2/4", "loads weights, 50 %"),
    (f"{RECORD}Loading weights took 12.31 seconds", "has loaded weights"),
    (f"{RECORD}Dynamo bytecode transform time: 4.41 s", "compiles"),
    (f"{RECORD}[rank 0] Compiling a graph for compile range (1, 2048) takes 9 s", "compiles"),
    (f"{RECORD}GPU KV cache size: 524,288 tokens", "has allocated the KV cache"),
    ("Capturing CUDA graphs (decode, FULL):  34%|###4  | 12/35", "captures CUDA graphs, 30 %"),
    (f"{RECORD}Graph capturing finished in 21 secs, took 0.5 GiB", "has captured CUDA graphs"),
)


def test_a_start_is_followed_from_download_to_capture() -> None:
    stage = StartStage()
    assert stage.text == ""
    for line, expected in START:
        stage.feed(line)
        assert stage.text == expected
        stage.feed(f"{RECORD}Using max model len 8192")
        assert stage.text == expected, "other lines change nothing"


def test_a_start_never_goes_back() -> None:
    stage = StartStage()
    bar = "Loading safetensors checkpoint shards:  {}% Completed"
    for line in (bar.format(80), bar.format(20), f"{RECORD}Starting to load model a..."):
        stage.feed(line)
        assert stage.text == "loads weights, 80 %"
    stage.feed(f"{RECORD}Loading weights took 12.31 seconds")
    # The weights of a drafting model.
    stage.feed(bar.format(10))
    assert stage.text == "has loaded weights"
    assert StartStage().text == "", "another start has its own"


def test_of_a_bar_that_is_drawn_again_the_last_state_counts() -> None:
    stage = StartStage()
    bar = "Loading safetensors checkpoint shards:  {}% Completed"
    stage.feed("\r".join(bar.format(share) for share in (0, 10, 48)))
    assert stage.text == "loads weights, 40 %"


@pytest.mark.parametrize(
    "line",
    [
        f"{RECORD}Enforce eager set, disabling torch.compile, CUDAGraphs",
        f"{RECORD}non-default args: {{'model': 'Fetching 4 files: 25%'}}",
        "",
        "\r",
    ],
)
def test_what_only_mentions_a_stage_is_none(line: str) -> None:
    stage = StartStage()
    stage.feed(line)
    assert stage.text == ""


BAR = """
import sys, time
print("\\rLoading safetensors checkpoint shards:  70% Completed", end="", flush=True)
time.sleep(60)
"""


async def test_a_bar_is_read_before_its_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is no agent: its other children belong to other tests.
    monkeypatch.setattr(subreaper, "kill_descendants", lambda _: True)
    launch = Launch((sys.executable, "-c", BAR), {**os.environ})
    process = await EngineProcess.start(
        launch, cores=(), scratch=tmp_path, stop_grace=0.0, sink=lambda _: None
    )
    try:
        async with asyncio.timeout(60):
            while process.start_stage != "loads weights, 70 %":  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
    finally:
        process.kill()
        await process.stop()
