"""What people see on a terminal, and what programs read from a pipe."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from cleave.cli.output.tables import build_plain_table, convert_keys, print_full_width


@pytest.fixture
def table() -> Table:
    table = build_plain_table(("INSTANCE",), ("RUN", "KV%"))
    table.add_row("chat-prefill-0", "0", "12.5")
    table.add_row("chat-decode-0", "17", "-")
    return table


def test_in_a_pipe_a_table_is_a_line_per_row(table: Table) -> None:
    printed = io.StringIO()
    print_full_width(Console(file=printed, width=20), table)
    assert printed.getvalue() == (
        "INSTANCE         RUN    KV%\nchat-prefill-0     0   12.5\nchat-decode-0     17      -\n"
    )


def test_on_a_terminal_its_headings_are_underlined(table: Table) -> None:
    printed = io.StringIO()
    print_full_width(Console(file=printed, width=20, force_terminal=True), table)
    assert "───" in printed.getvalue()


def test_keys_are_spelled_as_in_resources() -> None:
    document = {"num_running": 1, "ttft_p50_ms": [{"kv_path": "a_b"}], "uid": ({"x": 1},)}
    expected = {"numRunning": 1, "ttftP50Ms": [{"kvPath": "a_b"}], "uid": [{"x": 1}]}
    assert convert_keys(document) == expected
