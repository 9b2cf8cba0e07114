"""What is said of progress in a pipe, and while the simulator is compiled before a first plan."""

import threading

import pytest

from cleave.cli.output import progress_bar
from cleave.cli.output.progress_bar import show_progress, show_simulation_progress
from cleave.simulator import run

WAIT_S = 60


class Compilation:
    """Stands for the simulator's machine code; `num_calls` counts how often it was looked for."""

    def __init__(self) -> None:
        self.is_done = False
        self.num_calls = 0
        self.called_again = threading.Event()

    def is_compiled(self, has_blocks: bool) -> bool:
        self.num_calls += 1
        # The first question is whether anything is to be announced; lines follow the next ones.
        if self.num_calls > 3:
            self.called_again.set()
        return self.is_done


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    found = Compilation()
    monkeypatch.setattr(run, "is_compiled", found.is_compiled)
    monkeypatch.setattr(progress_bar, "REPEAT_S", 0.01)
    return found


def test_a_long_compilation_is_reported_until_it_ends(
    compilation: Compilation, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_simulation_progress("planning"):
        assert compilation.called_again.wait(WAIT_S)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("compiling the simulator once for this version: ")
    assert len(lines) >= 2
    assert all(line.startswith("still compiling the simulator after ") for line in lines)


def test_in_a_pipe_lines_say_from_time_to_time_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "REPEAT_S", 0.0)
    with show_progress("probing") as tick:
        tick(3, 9, "prefill 4 x 512")
        tick(4, 9, "")
    assert capsys.readouterr().err == "probing, 3 of 9: prefill 4 x 512\nprobing, 4 of 9\n"
    monkeypatch.setattr(progress_bar, "REPEAT_S", 60.0)
    with show_progress("probing") as tick:
        tick(1, 9, "")
    assert capsys.readouterr().err == "", "short commands stay silent"


def test_nothing_is_said_where_it_was_compiled_before(
    compilation: Compilation, capsys: pytest.CaptureFixture[str]
) -> None:
    compilation.is_done = True
    with show_simulation_progress("planning"):
        pass
    assert capsys.readouterr().err == ""
    assert compilation.num_calls == 1
