"""An engine that takes too long is a line, and the other ways are tried."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import httpx
import pytest

pytest.importorskip("torch", reason="torch comes with the engine")

Import = Callable[[str], ModuleType]


def test_a_request_that_takes_too_long_ends_its_way_with_a_line_and_no_other(
    module: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = module("faults")

    @contextmanager
    def deployed(*_: object) -> Iterator[None]:
        yield

    def ask_all(_: None, way: str, transfer: str, count: int) -> dict[str, object]:
        if transfer == "Pull":
            request = httpx.Request("POST", "http://engine/v1/completions")
            raise httpx.ReadTimeout("timed out", request=request)
        return {"transfer": transfer, "wrong": 0}

    monkeypatch.setattr(faults, "deployed", deployed)
    monkeypatch.setattr(faults, "build", lambda _: None)
    monkeypatch.setattr(faults, "manifest", lambda *_: {})
    monkeypatch.setattr(faults, "ask_all", ask_all)
    monkeypatch.setattr(faults, "hurt", lambda *_: faults.Tally.__new__(faults.Tally))
    monkeypatch.setattr(faults.Tally, "rows", lambda _: iter(()))
    monkeypatch.setattr(faults.Tally, "reasons", lambda _: iter(()))
    words = ["faults", "--ways", "gloo", "--transfers", "Pull", "Push", "-o", "json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="True"):
        faults.main()
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("gloo, Pull: http://engine/v1/completions took longer than ")
    assert '"transfer": "Push"' in output.out
