"""Every function and class of the modules that docs/papers.md names has a caller in the product.

A mechanism whose code only tests and benchmarks call does nothing for users. Functions and classes
of modules are found through imports, from the modules that the page does not name, and from what
runs when a module is imported: a namesake elsewhere is no caller, nor are functions that only call
each other. Methods are found by their names, since the types of objects are not known here.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
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
    "build_fixed": "workloads of equal requests, whose results are known",
    "compute_per_chunk_ms": "compared with measured transfers in benchmarks/kv",
    "compute_per_layer_ms": "compared with measured transfers in benchmarks/kv",
    "num_leased": "what is left of leases after a request",
}
"""Names that nothing in the product calls, and what calls them."""
LOADED = {
    "CleaveConnector": "vLLM loads it by kv_connector and kv_connector_module_path",
    "OffloadingConnector": "the same",
}
"""Names that are called from outside, and how."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Top = tuple[Path, str]
"""A module, and the name of a function or class in it."""


def find_unreachable(trees: dict[Path, ast.Module], named: list[Path]) -> set[Top]:
    """Functions and classes of `named` that neither other modules nor imports of modules lead to.
    Modules lie in a folder below that of their first package."""
    modules = {to_module(path): path for path in trees}
    tops = {path: {each.name for each in list_tops(tree)} for path, tree in trees.items()}
    uses: dict[Top | None, set[Top]] = defaultdict(set)
    for path, tree in trees.items():
        resolve = build_resolver(path, tree, tops[path], modules)
        for statement in tree.body:
            is_part = isinstance(statement, Definition) and path in named
            owner = (path, statement.name) if is_part else None
            uses[owner] |= {top for node in ast.walk(statement) for top in resolve(node)}
    reached: set[Top] = set()
    ahead = uses[None] | {(path, name) for path in named for name in tops[path] if name in LOADED}
    while ahead:
        reached |= ahead
        ahead = {top for owner in ahead for top in uses[owner]} - reached
    return {(path, name) for path in named for name in tops[path]} - reached


def build_resolver(
    path: Path, tree: ast.Module, own: set[str], modules: dict[str, Path]
) -> Callable[[ast.AST], Iterator[Top]]:
    """A function from a node to the functions and classes of modules that it uses."""
    names: dict[str, Top] = {name: (path, name) for name in own}
    aliases: dict[str, Path] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                whole, alias = f"{node.module}.{each.name}", each.asname or each.name
                if whole in modules:
                    aliases[alias] = modules[whole]
                elif node.module in modules:
                    names[alias] = modules[node.module], each.name
        elif isinstance(node, ast.Import):
            found = {each.asname or each.name: modules.get(each.name) for each in node.names}
            aliases |= {alias: module for alias, module in found.items() if module}

    def resolve(node: ast.AST) -> Iterator[Top]:
        if isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        elif isinstance(node, ast.Attribute):
            module = spell(node.value)
            if module in aliases:
                yield aliases[module], node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # VLLM loads classes by strings such as "package.module.Class".
            owner, _, name = node.value.replace(":", ".").rpartition(".")
            if owner in modules:
                yield modules[owner], name

    return resolve


def spell(node: ast.expr) -> str:
    """A name with dots; empty: it is none."""
    if isinstance(node, ast.Attribute):
        before = spell(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def to_module(path: Path) -> str:
    """The name that it is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(part for part in parts if part != "__init__")


def list_tops(tree: ast.Module) -> Iterator[Definition]:
    yield from (node for node in tree.body if isinstance(node, Definition))


def find_uncalled_methods(trees: dict[Path, ast.Module], named: list[Path]) -> set[Top]:
    """Methods of `named` whose name no other living code uses, callers of it alone included;
    of classes that inherit nothing: a base may call its overridden methods."""
    uses = Counter(name for tree in trees.values() for name in list_names(tree))
    alive = {
        (path, node.name): Counter(list_names(node))
        for path in named
        for top in list_tops(trees[path])
        if isinstance(top, ast.ClassDef) and not top.bases
        for node in top.body
        if isinstance(node, Definition) and not node.name.startswith("__")
    }
    uncalled: set[Top] = set()
    while dead := {top for top, own in alive.items() if uses[top[1]] <= own[top[1]]}:
        uncalled |= dead
        for top in dead:
            uses -= alive.pop(top)
    return uncalled


def list_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def test_what_the_papers_page_names_is_called_by_the_product() -> None:
    named = re.findall(r"`((?:operator|worker)/[\w/]+(?:\.py)?)`", PAPERS.read_text())
    paths = {ROOT / name for name in named}
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    modules = [path for path in SOURCES if path in paths or path.parent in paths]
    assert len(modules) > 100
    uncalled = find_unreachable(trees, modules) | find_uncalled_methods(trees, modules)
    names = {name for _, name in uncalled}
    faults = {name: str(path.relative_to(ROOT)) for path, name in uncalled if name not in OBSERVED}
    assert not faults, "nothing in the product calls these: remove them, or give them a caller"
    assert set(OBSERVED) <= names, "these have callers: remove them from OBSERVED"


def test_every_function_that_the_papers_page_names_exists_in_the_modules_of_its_row() -> None:
    faults = []
    for row in PAPERS.read_text().splitlines():
        paths = re.findall(r"`((?:operator|worker)/[\w/]+\.py)`", row)
        texts = "\n".join((ROOT / path).read_text() for path in paths)
        for name in re.findall(r"`([a-z_]+)`", row):
            if paths and "_" in name and not re.search(rf"\b{name}\b", texts):
                faults.append(f"{row[:8]}: {name}")
    assert not faults


def parse(**modules: str) -> dict[Path, ast.Module]:
    """Modules of a package."""
    folder = ROOT / "operator" / "made_up"
    return {folder / f"{name}.py": ast.parse(text) for name, text in modules.items()}


def test_callers_that_nothing_calls_do_not_count() -> None:
    trees = parse(
        named="class Used: ...\n"
        "def alone():\n    return helper() + Used()\n"
        "def helper():\n    return alone()\n"
        "Used()\n"
    )
    assert {name for _, name in find_unreachable(trees, list(trees))} == {"alone", "helper"}


def test_a_namesake_is_no_caller() -> None:
    trees = parse(
        named="def decide(): ...\ndef score(): ...\ndef choose(): ...\ndef load(): ...\n",
        other="from made_up import named\n"
        "from made_up.named import choose as pick\n"
        "def decide(): ...\n"
        "decide()\nthing.decide()\nnamed.score()\npick()\n"
        "PATH = 'made_up.named.load'\n",
    )
    named, _ = trees
    assert find_unreachable(trees, [named]) == {(named, "decide")}


def test_methods_that_nothing_calls_are_found() -> None:
    trees = parse(
        named="class Used:\n"
        "    def one(self): ...\n"
        "    def two(self):\n        return self.three()\n"
        "    def three(self): ...\n"
        "Used().one()\n"
    )
    assert {name for _, name in find_uncalled_methods(trees, list(trees))} == {"two", "three"}
