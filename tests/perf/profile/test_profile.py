"""The file of a measured profile."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cleave.perf.profile import profile
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.profile.profile import DecodePoint, PrefillPoint

from tests.support import measured_profiles

Change = Callable[[dict], object]


@pytest.mark.parametrize("name", ["p.yaml", "p.json"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    whole = measured_profiles.from_fit(
        0.01, operators=measured_profiles.operators(), max_model_len=2048
    )
    profile.write_profile(whole, tmp_path / name)
    assert profile.read_profile(tmp_path / name) == whole
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_points_stand_on_one_line_each_what_was_measured_first(tmp_path: Path) -> None:
    profile.write_profile(measured_profiles.from_fit(), tmp_path / "p.yaml")
    text = (tmp_path / "p.yaml").read_text()
    assert "- {batch: 1, contextTokens: 64, ms: " in text
    assert text.startswith("kind: LatencyProfile\nversion: 1\nmodel: facebook/opt-13b\n")


def test_an_unquoted_date_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile.write_profile(measured_profiles.from_fit(), path)
    path.write_text(path.read_text().replace("'2026-11-21'", "2026-11-21"))
    assert profile.read_profile(path).measured_at == "2026-11-21"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda d: d["decode"][0].update(ms=float("nan")), r"decode\[0\]\.ms: nan is out of range"),
        (lambda d: d["prefill"][1].update(ms=-3), r"prefill\[1\]\.ms: -3\.0 is out of range"),
        (lambda d: d["prefill"][1].update(ms=0), r"prefill\[1\]\.ms: 0 is not a measurement"),
        (lambda d: d["prefill"][0].update(tokens=0), r"prefill\[0\]\.tokens: 0 is out of range"),
        (
            lambda d: d["prefill"][0].update(tokens="64"),
            r"tokens: must be a whole number \(got '64'",
        ),
        (
            lambda d: d["prefill"][0].update(tokens=True),
            r"tokens: must be a whole number \(got True",
        ),
        (lambda d: d["prefill"].reverse(), r"prefill\[1\]: .* comes after .*; sort the points"),
        (lambda d: d["decode"].append(d["decode"][-1]), "sort the points and measure each once"),
        (lambda d: d.update(prefill=[]), "needs both prefill and decode points, or operators"),
        (lambda d: d.update(prefill=d["prefill"][:1]), "prefill: has 1 points; measure 2 or more"),
        (lambda d: d.update(decode=7), r"decode: must be a list \(got 7\)"),
        (lambda d: d.update(decode=[7, 8]), r"decode\[0\]: must be an object \(got 7\)"),
        (lambda d: d.pop("model"), "model: is missing"),
        (lambda d: d.update(model=""), "model: '' must be 1 to 256 printable characters"),
        (lambda d: d.update(kvCapacityTokens=0), "kvCapacityTokens: 0 is out of range"),
        (lambda d: d.update(kvCapacity=1), "kvCapacity: unknown field; known: model, device"),
        (lambda d: d.update(version=9), "version: 9 is unknown; this Cleave reads 1"),
        (lambda d: d.update(kind="Pod"), "is no profile: kind must be LatencyProfile"),
        (lambda d: d.update(software=[]), r"software: must be an object \(got \[\]\)"),
        (lambda d: d["prefill"][0].update(ms=10**400), "ms: must be a number"),
    ],
)
def test_a_fault_is_one_line_with_its_path(tmp_path: Path, change: Change, fault: str) -> None:
    path = tmp_path / "p.yaml"
    profile.write_profile(measured_profiles.from_fit(), path)
    document = yaml.safe_load(path.read_text())
    change(document)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InvalidProfileError, match=fault) as caught:
        profile.read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("p.yaml", b"{", "not YAML"),
        ("p.yaml", b"", "is no profile"),
        ("p.yaml", b"&a [*a]", "is no profile"),
        ("p.json", b"{", "not JSON"),
        ("p.json", b"[" * 100_000, "not JSON"),
        ("p.json", b"\xff", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_none_is_one_line(
    tmp_path: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidProfileError, match=fault) as caught:
        profile.read_profile(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_list_inside_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("{kind: LatencyProfile, version: 1, model: &a [*a]}")
    with pytest.raises(InvalidProfileError, match=r"model: must be text \(got \[\[\.\.\.\]\]\)"):
        profile.read_profile(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfileError, match=r"p\.yaml: No such file"):
        profile.read_profile(tmp_path / "p.yaml")


def test_prompts_of_one_length_draw_no_line() -> None:
    points = (PrefillPoint(tokens=512, ms=1.0), PrefillPoint(prompts=2, tokens=256, ms=1.0))
    with pytest.raises(InvalidProfileError, match="two lengths or more"):
        measured_profiles.from_fit(prefill=points)


def test_points_may_come_from_operators_alone() -> None:
    alone = replace(
        measured_profiles.from_fit(), prefill=(), decode=(), operators=measured_profiles.operators()
    )
    assert alone.operators is not None


def test_numbers_of_operators_are_checked_too() -> None:
    with pytest.raises(InvalidProfileError, match=r"operators\.numLayers: 0 is out of range"):
        measured_profiles.operators(num_layers=0)
    with pytest.raises(InvalidProfileError, match=r"operators\.decodeAttention: has 0 points"):
        measured_profiles.operators(decode_attention=())


def test_json_has_camel_case_keys_and_no_defaults(tmp_path: Path) -> None:
    profile.write_profile(measured_profiles.from_fit(), tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["kvCapacityTokens"] == 60_000
    assert "tensorParallelSize" not in document
    assert document["prefill"][0] == {
        "tokens": 64,
        "ms": measured_profiles.TRUTH.predict_prefill_ms([64]),
    }
    assert DecodePoint(batch=1, context_tokens=0, ms=1.0).key == (1, 0)
