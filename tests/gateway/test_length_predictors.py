"""Which predictor a gateway goes by."""

import logging
from pathlib import Path

import pytest

from cleave.gateway.config import GatewayConfig
from cleave.gateway.main import main
from cleave.gateway.server import GatewayServer
from cleave.gateway.tracing.access_log import ACCESS_LOGGER
from cleave.logs import JsonFormatter
from cleave.policy.output_length import ConditionalMean, RangeTree
from cleave.traffic import length_file, length_training
from cleave.traffic.length_file import LengthFile, Score, Scores

MEAN = Score([0.3, 0.5, 0.8], 100, 0)
BETTER = Score([0.5, 0.7, 0.8], 50, 0)


def write(path: Path, score: Score) -> Path:
    found = LengthFile(
        *(length_file.FORMAT, "t.csv", 700, 300, 0.2, Scores(score, MEAN, MEAN)),
        *([0, 0, 0], [500.5, 0, 0], [1, 0, 0], [2, 0, 0], [90, 20, 900], [[0] * 3] * 3),
    )
    length_file.write_length_file(path, found)
    return path


def predict_with(**options: Path) -> object:
    return GatewayServer(GatewayConfig(agents="", **options)).context.router.length_predictor


def test_a_file_that_is_better_is_used(tmp_path) -> None:
    assert isinstance(
        predict_with(output_length_model=write(tmp_path / "l.json", BETTER)), RangeTree
    )


def test_one_that_is_not_better_is_said_and_not_used(tmp_path, caplog) -> None:
    path = write(tmp_path / "l.json", MEAN)
    assert isinstance(predict_with(output_length_model=path), ConditionalMean)
    assert f"{path} is not used: not better than the mean by prompt length" in caplog.text


def test_without_a_file_the_mean_is_learnt() -> None:
    assert isinstance(predict_with(), ConditionalMean)


async def test_a_request_is_entered_with_what_the_file_foretells(make_stage, tmp_path) -> None:
    path = write(tmp_path / "l.json", BETTER)
    stage = await make_stage({"x": "mixed"}, output_length_model=path)
    router = stage.context.router
    picks = [router.pick("m", tokens, limit) for tokens, limit in ((300, 0), (800, 0), (800, 64))]
    assert [pick.output_tokens for pick in picks] == [20, 900, 64]
    for pick in picks:
        router.release(pick)
    await stage.ask({"model": "m", "prompt": "hello", "stream": True})
    assert router.length_predictor.predict(2) == 20


async def test_the_access_log_is_a_trace_to_train_from(
    make_stage, tmp_path, caplog, monkeypatch
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    stage = await make_stage({"p": "prefill", "d": "decode"}, access_log=True)
    for limit in (None, 2, 40):
        ask = {"model": "m", "prompt": "hello" * 20, "stream": True}
        await stage.ask(ask if limit is None else ask | {"max_tokens": limit})
    await stage.until_idle()
    lines = [JsonFormatter().format(each) for each in caplog.records if each.name == ACCESS_LOGGER]
    path = tmp_path / "access.jsonl"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(length_training, "MIN_REQUESTS", 2)
    answers, blurred = length_training.read_requests(path)
    assert blurred == 0
    # Three tokens each at any limit; two of them are the second one's limit.
    assert answers.limits.tolist() == [0, 40]
    assert answers.output_tokens.tolist() == [3, 3]
    assert answers.prompt_tokens.tolist() == [(100 + len('""')) // 4 + 1] * 2


@pytest.mark.parametrize("content", ["", "{}"])
def test_an_unreadable_file_is_one_line_and_exit_code_2(tmp_path, caplog, content) -> None:
    path = tmp_path / "l.json"
    path.write_text(content)
    assert main(["--port", "0", "--agents", "", "--lengths", str(path)]) == 2
    assert f"{path}: not a file of trained lengths" in caplog.text
