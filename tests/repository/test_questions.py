"""CONTRIBUTING.md, "Where is it?": each answer names a file and what it defines there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERS = re.findall(
    r"^\| (.+\?) \| `([\w/.]+)` \| `(\w+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
)


def test_twelve_questions_of_a_newcomer_are_answered() -> None:
    assert len(ANSWERS) >= 12


@pytest.mark.parametrize(("question", "path", "name"), ANSWERS)
def test_the_answer_stands_where_it_is_said_to(question: str, path: str, name: str) -> None:
    defined = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                defined.add(node.name)
            case (
                ast.Assign(targets=[ast.Name(id=target)])
                | ast.AnnAssign(target=ast.Name(id=target))
            ):
                defined.add(target)
    assert name in defined, question
