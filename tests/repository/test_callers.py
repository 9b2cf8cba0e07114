"""Every function and class of the modules that docs/papers.md names has a caller in the product.

A mechanism whose code only tests and benchmarks call does nothing for users. Names are compared,
not objects: a use of the same name elsewhere counts as a call.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "docs" / "papers.md"
SOURCES = [
    path
    for folder in ("operator", "worker")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
OBSERVED = {
    "active_parameters": "compared with the number that a model's publisher states",
    "build_fixed": "workloads of equal requests, whose results are known",
    "compute_per_chunk_ms": "compared with measured transfers in benchmarks/kv",
    "compute_per_layer_ms": "compared with measured transfers in benchmarks/kv",
    "num_leased": "what is left of leases after a request",
}
"""Names that nothing in the product calls, and what calls them."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def list_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # vLLM loads classes by strings such as "package.module.Class".
            yield from re.findall(r"\w+", node.value) if " " not in node.value else ()


def list_definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Functions, classes, and the methods of classes that inherit nothing: a base may call its
    overridden methods."""
    for node in body:
        if not isinstance(node, Definition):
            continue
        yield node
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from list_definitions(node.body)


def find_uncalled(trees: dict[Path, ast.Module], named: list[Path]) -> dict[str, str]:
    """Name -> file of each definition in `named` that no living code uses, callers of it alone
    included."""
    uses = Counter(name for tree in trees.values() for name in list_uses(tree))
    alive = {
        (path, node.name): Counter(list_uses(node))
        for path in named
        for node in list_definitions(trees[path].body)
        if not node.name.startswith("__")
    }
    uncalled: dict[str, str] = {}
    while dead := [(path, name) for (path, name), own in alive.items() if uses[name] <= own[name]]:
        for path, name in dead:
            uncalled[name] = str(path.relative_to(ROOT))
            uses -= alive.pop((path, name))
    return uncalled


def test_what_the_papers_page_names_is_called_by_the_product() -> None:
    named = re.findall(r"`((?:operator|worker)/[\w/]+(?:\.py)?)`", PAPERS.read_text())
    paths = {ROOT / name for name in named}
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    modules = [path for path in SOURCES if path in paths or path.parent in paths]
    assert len(modules) > 50
    uncalled = find_uncalled(trees, modules)
    faults = {name: path for name, path in uncalled.items() if name not in OBSERVED}
    assert not faults, "nothing in the product calls these: remove them, or give them a caller"
    assert set(OBSERVED) <= set(uncalled), "these have callers: remove them from OBSERVED"


def test_callers_that_nothing_calls_do_not_count() -> None:
    tree = ast.parse(
        "class Used:\n    def one(self): ...\n    def two(self): ...\n"
        "def alone():\n    return helper() + Used().one()\n"
        "def helper(): ...\n"
        "Used().one()\n"
    )
    path = ROOT / "operator" / "made_up.py"
    assert set(find_uncalled({path: tree}, [path])) == {"alone", "helper", "two"}
