"""Which modules are compiled: a class that is C cannot have subclasses that are not."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("compile_script", ROOT / "scripts" / "compile.py")
assert _spec is not None
assert _spec.loader is not None
compile_script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compile_script)

COMPILED = {
    f"cleave.{package}.{module}"
    for package, modules in compile_script.MODULES.items()
    for module in modules.split()
}


def test_names_of_modules_are_settled_and_types_are_not() -> None:
    source = (
        '"""What it is."""\n\nimport math\n\nMOST = 4\n_find = math.sin\nFields = dict[str, int]\n'
    )
    assert compile_script.settle(source) == (
        '"""What it is."""\nfrom typing import Final\n\nimport math\n\n'
        "MOST: Final = 4\n_find: Final = math.sin\nFields = dict[str, int]\n"
    )


def test_several_names_of_one_line_are_settled_each_by_itself_and_stay_on_it() -> None:
    source = '"""What it is."""\n\nONE, TWO = 1, MOST + 1\nBOTH = 1, 2\n'
    assert compile_script.settle(source) == (
        '"""What it is."""\nfrom typing import Final\n\n'
        "ONE: Final = 1; TWO: Final = MOST + 1\nBOTH: Final = 1, 2\n"
    )


def find_path(module: str) -> Path:
    return ROOT / "operator" / f"{module.replace('.', '/')}.py"


@pytest.mark.parametrize("module", sorted(COMPILED))
def test_every_module_that_is_compiled_is_there(module: str) -> None:
    assert find_path(module).exists()


def test_subclasses_of_compiled_classes_are_compiled() -> None:
    left_out = []
    for path in (ROOT / "operator" / "cleave").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "operator").with_suffix("").parts)
        if module in COMPILED:
            continue
        tree = ast.parse(path.read_text())
        origins = {
            name.asname or name.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        bases = [
            base.id
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            if isinstance(base, ast.Name)
        ]
        protocols = ("ClientSlot", "Sweepable")
        left_out += [
            (module, base)
            for base in bases
            if origins.get(base) in COMPILED and base not in protocols
        ]
    assert left_out == []
