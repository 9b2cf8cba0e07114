"""Comments of values.yaml become the chart's README and its schema's descriptions."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def chart_values() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_values", ROOT / "scripts/chart_values.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_comment_describes_the_key_below_it_and_mappings_without_comments_are_values(
    chart_values,
) -> None:
    text = """\
# About the file.

# Of a.
a: 1
b:
  # Of c,
  # over two lines.
  c:
    d: 1
    e: {f: 2}
  # Of g.
  g: []
"""
    assert list(chart_values.read_values(text)) == [
        (("a",), "Of a."),
        (("b", "c"), "Of c, over two lines."),
        (("b", "g"), "Of g."),
    ]


def test_a_value_without_a_comment_is_named(chart_values) -> None:
    with pytest.raises(chart_values.ValuesError, match=r"b\.c has no comment"):
        list(chart_values.read_values("b:\n  # Of a.\n  a: 1\n  c: 2\n"))


def test_every_value_is_in_the_readme_and_described_in_the_schema(chart_values) -> None:
    text = (ROOT / "charts/cleave/values.yaml").read_text()
    readme = (ROOT / "charts/cleave/README.md").read_text()
    schema = json.loads((ROOT / "charts/cleave/values.schema.json").read_text())
    values = list(chart_values.read_values(text))
    assert len(values) > 60
    assert readme == chart_values.build_readme(values, yaml.safe_load(text))
    for path, comment in values:
        node = schema
        for key in path:
            node = node["properties"][key]
        assert node["description"] == comment
