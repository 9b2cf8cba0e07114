"""The page as text: one file, everything inside, nothing executable from names."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

from cleave.report.load_study import run_study
from cleave.report.page import render_page
from cleave.report.what_if import compute_what_if


class Reader(HTMLParser):
    """Collects what the page would load, and its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "link", "input", "br", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def data(html: str):
    return json.loads(re.search(r'id="data">(.*?)</script>', html).group(1))


def test_nothing_is_loaded_from_anywhere(study) -> None:
    reader = Reader(render_page(study))
    assert reader.links == ["data:,"]
    assert reader.open == []


def test_the_file_stays_below_three_megabytes(study) -> None:
    assert len(render_page(study).encode()) < 3_000_000


def test_the_page_says_verdict_reason_change_and_warnings(study) -> None:
    html = render_page(study)
    for text in (study.result.reason, study.result.what_would_change, *study.result.warnings):
        assert text in html
    assert "disaggregate</span>" in html


def test_a_share_of_one_latency_is_shown_where_it_has_a_target(study) -> None:
    assert "by TPOT" not in render_page(study)
    slo = study.report_input.slo.model_copy(update={"tpot_attainment": 0.99})
    html = render_page(replace(study, report_input=replace(study.report_input, slo=slo)))
    assert "by TPOT" in html
    assert "target 99 %" in html


def test_names_from_outside_stay_text(study) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    subject = replace(study.report_input, deployment=evil, model=evil, traffic=evil)
    answer = replace(study.result, reason=evil, warnings=(evil,))
    html = render_page(replace(study, report_input=subject, result=answer))
    assert evil not in html
    assert Reader(html).links == ["data:,"]


def test_every_point_of_the_sliders_is_inside(study) -> None:
    points = data(render_page(study))["whatIf"]
    assert len(points["points"]) == len(points["copies"]) == len(compute_what_if(study).points)


def test_an_infeasible_answer_names_the_nearest_slo_and_draws_nothing(subject, infeasible) -> None:
    html = render_page(run_study(subject, infeasible, bench=None))
    assert html.count("no plan meets TTFT 20 ms") == 1
    assert ">360 ms<small>requested 40.0 ms<" in html
    assert data(html) == {"charts": {}, "whatIf": None, "plans": []}
