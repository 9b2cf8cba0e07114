"""Pictures of dashboards: what Grafana makes of their JSON, and a fleet whose panels have data."""

from pathlib import Path

import pytest

from e2e.pictures.boards import (
    KINDS,
    Panel,
    Series,
    build_series,
    compute_rate_interval,
    fill_variables,
    name_series,
    read_boards,
)
from e2e.pictures.page import CHROMIUM, UnknownUnitError, build_page
from e2e.pictures.run import BOARDS, DRAWN, DRAWN_OF_CLUSTER, draw, record
from e2e.support.prometheus import ROOT, find_programs

MOST_BYTES = 300_000
"""Of a picture in the documents."""
DURATION_S = 45


def test_every_dashboard_is_read_with_all_its_panels() -> None:
    boards = {board.name: board for board in read_boards(BOARDS)}
    assert {*boards} == {"control", "pools", "serving"}
    assert [row.title for row in boards["serving"].rows] == ["Now", "Targets", "Latency", "Traffic"]
    assert boards["pools"].panels[0].title == "Ready, by role"
    assert boards["pools"].panels[0].decimals == 0
    assert {panel.kind for board in boards.values() for panel in board.panels} == {*KINDS}
    assert {*boards} == {*DRAWN, *DRAWN_OF_CLUSTER}, "each is drawn"


def test_the_documents_have_a_picture_of_every_board_that_is_drawn() -> None:
    for name in (*DRAWN, *DRAWN_OF_CLUSTER):
        file = ROOT / "docs" / "pictures" / f"{name}.png"
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size < MOST_BYTES
        assert f"(pictures/{name}.png)" in (ROOT / "docs" / "observe.md").read_text()


def test_variables_are_filled_in_as_grafana_does() -> None:
    query = 'rate(x{model=~"$model"}[$__rate_interval])'
    filled = fill_variables(query, {"model": "chat", "__rate_interval": "20s"})
    assert filled == 'rate(x{model=~"chat"}[20s])'
    with pytest.raises(KeyError):
        fill_variables("$unknown", {})
    assert compute_rate_interval(scrape_s=5, step_s=5) == 20
    assert compute_rate_interval(scrape_s=5, step_s=60) == 65


def test_lines_are_named_by_their_labels_and_end_where_steps_are_missing() -> None:
    assert name_series("{{model}} {{ role }} all", {"model": "m"}) == "m  all"
    samples = [
        {"metric": {"role": "decode"}, "values": [[0, "1"], [5, "2"], [20, "3"], [25, "NaN"]]},
        {"metric": {"role": "mixed"}, "values": [[0, "NaN"]]},
    ]
    (line,) = build_series("{{role}}", samples, step_s=5)
    assert line == Series("decode", ((0, 1), (5, 2), (10, None), (20, 3)))


def test_a_page_has_the_panels_with_data_and_refuses_units_without_an_axis() -> None:
    (board,) = (board for board in read_boards(BOARDS) if board.name == "pools")
    ready, missing, *_ = board.panels
    line = Series("<decode>", ((0.0, 2.0), (5.0, None), (10.0, 3.0)))
    page = build_page(board, {ready: [line]}, 0.0, 10.0)
    assert ready.title in page
    assert missing.title not in page
    assert "&lt;decode&gt;" in page
    ended = Series("ended", ((0.0, 1.0), (5.0, 7.0)))
    table = build_page(board, {missing: [line, ended]}, 0.0, 10.0)
    assert "3</td>" in table, "a table of last values"
    assert "7</td>" not in table, "of what is there at the end"
    odd = Panel(ready.title, "furlong", None, ready.queries)
    board = type(board)(board.name, board.title, (type(board.rows[0])("R", (odd,)),))
    with pytest.raises(UnknownUnitError, match="furlong"):
        build_page(board, {odd: [line]}, 0.0, 10.0)


def test_a_heatmap_shows_the_buckets_own_counts_where_there_are_any() -> None:
    (board,) = (board for board in read_boards(BOARDS) if board.name == "serving")
    (panel,) = (each for each in board.panels if each.kind == "heatmap")
    counts = {"0.1": 0.0, "0.5": 4.0, "1": 9.0, "+Inf": 9.0}
    lines = [Series(name, ((0.0, count),)) for name, count in reversed(counts.items())]
    page = build_page(board, {panel: lines}, 0.0, 10.0)
    assert '"z":[[4.0],[5.0]]' in page
    assert '"y":["0.5 s","1 s"]' in page


@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; scripts/bootstrap --tests installs it")
def test_every_panel_that_is_drawn_has_data_of_a_fleet_with_traffic(tmp_path: Path) -> None:
    programs = find_programs(build=False)
    if programs is None:
        pytest.skip("Prometheus is not here; scripts/prometheus builds it")
    boards = [board for board in read_boards(BOARDS) if board.name in DRAWN]
    recording = record(programs, tmp_path, DURATION_S, boards)
    assert recording.outcomes["200"] > 0
    draw(recording, boards, tmp_path)
    for name in DRAWN:
        assert (tmp_path / f"{name}.png").stat().st_size > 0
