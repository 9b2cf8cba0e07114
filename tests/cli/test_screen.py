import io

from rich.console import Console

from cleave.cli.screen import progress, table
from cleave.local.following import Step


def drawn(steps: list[Step], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(table(steps, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_long_log_line_is_cut_and_nothing_else() -> None:
    steps = [
        Step("chat-prefill-0", "prefill", "loading", 12.3, "[engine] loading shards " * 20),
        Step("chat-decode-0", "decode", "ready", 7.0, ""),
    ]
    first, second = drawn(steps)
    assert first.startswith("chat-prefill-0  loading   12 s  [engine] loading shards")
    assert first.endswith("…")
    assert len(first) == 80 - 2
    assert second == "chat-decode-0   ready      7 s"


def test_of_many_pods_those_that_are_not_ready_come_first() -> None:
    steps = [Step(f"p-{i}", "prefill", "ready", 1, "") for i in range(63)]
    steps.append(Step("d-0", "decode", "verifying", 1, ""))
    lines = drawn(steps)
    assert lines[0].startswith("d-0")
    assert lines[-1] == "63 of 64 ready"
    assert len(lines) == 17


def test_where_there_is_no_terminal_each_change_is_a_line() -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=80)) as show:
        for elapsed_s in (0.2, 1.0, 2.0):
            show([Step("p", "prefill", "loading", elapsed_s, "x")])
        show([Step("p", "prefill", "ready", 3.0, "")])
    assert out.getvalue() == "p  loading  0 s\np  ready  3 s\n"
