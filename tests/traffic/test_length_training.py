"""A classifier of output lengths: trained, evaluated, stored in a file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cleave.policy.output_length import ConditionalMean
from cleave.traffic import length_file, length_training
from cleave.traffic.length_file import LengthsError, Score
from cleave.traffic.length_training import CompletedRequests, read_requests, train
from cleave.traffic.recordings.history_error import HistoryError

NUM = 3_000


def record(path: Path, prompts, outputs, **more) -> Path:
    """A trace in lines of JSON."""
    columns = {"prompt_tokens": prompts, "output_tokens": outputs, **more}
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    lines = (json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def two_kinds(tmp_path: Path) -> Path:
    """Two applications whose prompts are of one class of the mean: 600 tokens, and 900."""
    rng = np.random.default_rng(3)
    is_long = rng.random(NUM) < 0.5
    outputs = np.where(is_long, 700, 60) + rng.integers(0, 40, NUM)
    return record(tmp_path / "trace.jsonl", np.where(is_long, 900, 600), outputs)


@pytest.fixture
def random_lengths(tmp_path: Path) -> Path:
    """Outputs that have nothing to do with their prompts."""
    rng = np.random.default_rng(4)
    prompts, outputs = rng.integers(1, 4_000, NUM), 1 + rng.exponential(200, NUM).astype(int)
    return record(tmp_path / "trace.jsonl", prompts, outputs)


def test_informative_prompts_are_learnt_and_found_better(two_kinds) -> None:
    found = train(two_kinds, prompt_error=0)
    assert found.tree.predict(600) == pytest.approx(80, abs=2)
    assert found.tree.predict(900) == pytest.approx(720, abs=2)
    assert found.scores.is_better
    assert found.scores.classifier.accuracy == [1, 1, 1]
    assert found.scores.conditional_mean.mean_absolute_error > 300
    assert (found.trained_on, found.judged_by) == (2_100, 900)


def test_uninformative_prompts_are_found_no_better(random_lengths) -> None:
    found = train(random_lengths)
    assert not found.scores.is_better
    assert found.scores.comparison.startswith("not better than the mean by prompt length")


def test_traffic_that_has_changed_since_is_found_out(two_kinds, tmp_path) -> None:
    found = train(two_kinds, prompt_error=0)
    prompts = np.tile([600, 900], NUM // 2)
    later, _ = read_requests(record(tmp_path / "later.jsonl", prompts, np.full(NUM, 300)), 0)
    assert not length_training.evaluate_classifier(found, later).is_better


def test_requests_that_come_later_are_the_judges(tmp_path) -> None:
    first, last = np.full(2_100, 600), np.full(900, 600)
    outputs = np.concatenate([first, last * 0 + 20])
    found = train(record(tmp_path / "t.jsonl", np.concatenate([first, last]), outputs))
    assert found.tokens[0] == 600
    assert found.scores.classifier.mean_absolute_error == 580


def test_prompts_are_blurred_like_those_that_gateways_estimate(two_kinds) -> None:
    exact, blurred = read_requests(two_kinds, 0.0)[0], read_requests(two_kinds, 0.2)[0]
    ratio = np.log(blurred.prompt_tokens / exact.prompt_tokens)
    assert ratio.std() == pytest.approx(0.2, rel=0.1)
    assert ratio.mean() == pytest.approx(0, abs=0.02)
    assert train(two_kinds).scores.classifier.accuracy[0] < 1


def test_estimates_of_the_gateway_are_used_unchanged(tmp_path) -> None:
    estimates = np.full(NUM, 77)
    trace = record(
        tmp_path / "t.jsonl",
        np.full(NUM, 100),
        np.full(NUM, 9),
        estimated_prompt_tokens=estimates,
    )
    answers, error = read_requests(trace, 0.2)
    assert (answers.prompt_tokens == 77).all()
    assert error == 0


def test_limits_inform_as_well_and_what_they_cut_is_left_out(tmp_path) -> None:
    limits = np.tile([100, 1_000, 0], 1_000)
    # Every fourth answer is cut by its limit.
    outputs = np.where(limits == 100, 50, 500)
    cut = (np.arange(NUM) % 4 == 0) & (limits > 0)
    outputs[cut] = limits[cut]
    trace = record(tmp_path / "t.jsonl", np.full(NUM, 300), outputs, max_tokens=limits)
    answers, _ = read_requests(trace)
    assert len(answers) == NUM - cut.sum()
    found = train(trace)
    assert [found.tree.predict(300, limit) for limit in (100, 1_000, 0)] == [50, 500, 500]


def test_every_leaf_foretells_the_mean_of_those_that_came_to_it(random_lengths) -> None:
    answers, _ = read_requests(random_lengths)
    found = train(random_lengths)
    came: dict[int, list[int]] = {}
    columns = answers.prompt_tokens, answers.limits, answers.output_tokens
    for prompt, limit, output in zip(*(column[:2_100].tolist() for column in columns), strict=True):
        came.setdefault(found.tree.find_leaf(prompt, limit), []).append(output)
    assert len(came) == found.below.count(0) > 5
    assert min(map(len, came.values())) >= 100
    for leaf, outputs in came.items():
        assert found.tokens[leaf] == pytest.approx(np.mean(outputs), abs=0.06)


def test_a_trace_that_is_too_short_is_reported(tmp_path) -> None:
    trace = record(tmp_path / "t.jsonl", [10] * 999, [10] * 999)
    with pytest.raises(LengthsError, match=r"t\.jsonl: 999 requests ended .* 1,000 are needed"):
        train(trace)


def test_a_limit_that_is_no_number_is_reported_with_its_line(tmp_path) -> None:
    limits: list[object] = [None] * NUM
    limits[7] = -3
    trace = tmp_path / "t.jsonl"
    rows = ({"prompt_tokens": 5, "output_tokens": 5, "max_tokens": limit} for limit in limits)
    trace.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(HistoryError, match=r"t\.jsonl:8: max_tokens -3: must be a whole number"):
        read_requests(trace)


def test_the_mean_is_evaluated_as_a_gateway_learns_it() -> None:
    answers = CompletedRequests(
        np.full(1_200, 50), np.zeros(1_200, dtype=np.int64), np.full(1_200, 90)
    )
    predicted = length_training.predict_by_mean(answers)
    assert (predicted[: length_training.IN_FLIGHT_REQUESTS] == length_training.INITIAL_TOKENS).all()
    taught = ConditionalMean(length_training.INITIAL_TOKENS)
    taught.observe(50, 90)
    assert predicted[length_training.IN_FLIGHT_REQUESTS + 1] == taught.predict(50)
    assert predicted[-1] == pytest.approx(90)


@pytest.mark.parametrize(
    ("error", "accuracy", "is_better"),
    [
        (90, [0.3, 0.5, 0.8], True),
        (99, [0.3, 0.5, 0.8], False),
        (90, [0.3, 0.5, 0.76], False),
        (90, [0.3, 0.5, 0.79], True),
        (90, [0.4, 0.6, 0.76], True),
    ],
)
def test_better_is_nearer_without_missing_more_ranges_on_average(
    error, accuracy, is_better
) -> None:
    assert Score(accuracy, error, 0).is_better_than(Score([0.3, 0.5, 0.8], 100, 0)) == is_better


def test_a_file_foretells_what_was_written(two_kinds, tmp_path) -> None:
    found = train(two_kinds)
    length_file.write_length_file(tmp_path / "lengths.json", found)
    assert length_file.read_length_file(tmp_path / "lengths.json") == found
    assert (tmp_path / "lengths.json").stat().st_size < length_file.MAX_BYTES / 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2 instead of 1"),
        ({"below": []}, "nodes are incomplete"),
        ({"tokens": [], "ranges": []}, "nodes are incomplete"),
        ({"below": [0, 0, 1], "above": [0, 0, 1]}, "node 2 has invalid children"),
        ({"below": [1, 0, 0], "above": [9, 0, 0]}, "node 0 has invalid children"),
        ({"features": [7, 0, 0]}, "node 0 compares an unknown feature 7"),
        ({"tokens": [-1, 0, 0]}, "node 0 predicts -1.0 tokens"),
        ({"ranges": [[1], [1], [1]]}, "node 0 has 1 ranges"),
        ({"scores": None}, "Expected `object`"),
    ],
)
def test_a_damaged_file_is_reported_at_once(tmp_path, change, message) -> None:
    half = Score([0.5] * 3, 1, 0)
    whole = length_file.LengthFile(
        *(1, "t.csv", 10, 5, 0.2, length_file.Scores(half, half, half)),
        *([0, 0, 0], [5, 0, 0], [1, 0, 0], [2, 0, 0], [3, 2, 4], [[0] * 3] * 3),
    )
    path = tmp_path / "lengths.json"
    length_file.write_length_file(path, whole)
    assert length_file.read_length_file(path) == whole
    length_file.write_length_file(path, replace(whole, **change))
    with pytest.raises(LengthsError) as caught:
        length_file.read_length_file(path)
    assert str(caught.value).startswith(f"{path}: not a file of trained lengths: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("make it with cleave lengths train")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b"x" * (2 << 20)])
def test_a_file_of_another_kind_is_reported_in_a_line(tmp_path, content) -> None:
    (tmp_path / "lengths.json").write_bytes(content)
    with pytest.raises(
        LengthsError, match=r"^.*lengths\.json: not a file of trained lengths: [^\n]*$"
    ):
        length_file.read_length_file(tmp_path / "lengths.json")


def test_a_missing_file_is_reported(tmp_path) -> None:
    with pytest.raises(LengthsError, match=r"none\.json: cannot be read: No such file"):
        length_file.read_length_file(tmp_path / "none.json")


def test_without_scikit_learn_the_error_names_what_to_install(two_kinds, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    with pytest.raises(LengthsError, match="needs the extra lengths: make setup"):
        length_training.train(two_kinds)
