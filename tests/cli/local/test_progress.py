import io
from dataclasses import replace

import pytest
from rich.console import Console

from cleave.cli.local.progress import LineProgress, build_table, show_startup
from cleave.local.progress import PodProgress


def drawn(steps: list[PodProgress], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(build_table(steps, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_long_log_line_is_cut_and_nothing_else() -> None:
    steps = [
        PodProgress("chat-prefill-0", "prefill", "loading", 12.3, "[engine] loading shards " * 20),
        PodProgress("chat-decode-0", "decode", "ready", 7.0, ""),
    ]
    first, second = drawn(steps)
    assert first.startswith("chat-prefill-0  loading   12 s  [engine] loading shards")
    assert first.endswith("…")
    assert len(first) == 80 - 2
    assert second == "chat-decode-0   ready      7 s"


def test_of_many_pods_those_that_are_not_ready_come_first() -> None:
    steps = [PodProgress(f"p-{i}", "prefill", "ready", 1, "") for i in range(63)]
    steps.append(PodProgress("d-0", "decode", "verifying", 1, ""))
    lines = drawn(steps)
    assert lines[0].startswith("d-0")
    assert lines[-1] == "63 of 64 ready"
    assert len(lines) == 17


def test_where_there_is_no_terminal_each_change_is_a_line() -> None:
    out = io.StringIO()
    with show_startup(Console(file=out, width=80)) as show:
        for elapsed_s in (0.2, 1.0, 2.0):
            show([PodProgress("p", "prefill", "loading", elapsed_s, "x")])
        show([PodProgress("p", "prefill", "ready", 3.0, "")])
    assert out.getvalue() == "p  loading  0 s\np  ready  3 s\n"


def test_each_stage_of_a_start_is_a_line() -> None:
    out = io.StringIO()
    lines = LineProgress(Console(file=out, width=80), lambda: 0.0)
    loading = PodProgress("p", "prefill", "loading", 3.0, "x")
    for stage in ("", "downloads the model", "loads weights", "loads weights"):
        lines.show([replace(loading, stage=stage)])
    assert out.getvalue().splitlines() == [
        "p  loading  3 s",
        "p  loading  3 s  downloads the model",
        "p  loading  3 s  loads weights",
    ]


def test_a_line_is_printed_at_least_every_15_s() -> None:
    out, now = io.StringIO(), 0.0
    lines = LineProgress(Console(file=out, width=80), lambda: now)
    for second in range(50):
        now = float(second)
        lines.show(
            [
                PodProgress("chat-prefill-0", "prefill", "loading", now, "engine starts"),
                PodProgress("chat-decode-0", "decode", "ready", 7.0, ""),
            ]
        )
    assert out.getvalue().splitlines() == [
        "chat-prefill-0  loading  0 s",
        "chat-decode-0  ready  7 s",
        *(
            f"still waiting: chat-prefill-0 loading {second} s (last log line: engine starts)"
            for second in (15, 30, 45)
        ),
    ]


FAILED = "engine ended with status 1: OSError: no such model"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_failure_is_a_line_as_soon_as_it_is_known(is_terminal: bool) -> None:
    out = io.StringIO()
    loading = PodProgress("p", "prefill", "loading", 3.0, "x")
    failed = replace(loading, restarts=1, last_failure=FAILED)
    with show_startup(Console(file=out, width=40, force_terminal=is_terminal)) as show:
        for step in (loading, failed, failed, replace(failed, state="ready")):
            show([step])
    assert out.getvalue().replace("\n", "").count(f"p: {FAILED}") == 1
