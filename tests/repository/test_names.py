"""Names that a Kubernetes or vLLM engineer knows: modules, classes and functions of both packages.

Each test names what breaks its rule. CONTRIBUTING.md, "Names", gives the reasons.
"""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"cleave": ROOT / "operator/cleave", "cleave_worker": ROOT / "worker/cleave_worker"}
MODULES = {
    ".".join((package, *path.relative_to(top).with_suffix("").parts)): path
    for package, top in PACKAGES.items()
    for path in sorted(top.rglob("*.py"))
    if path.name != "__init__.py" and "rpc/v1" not in path.as_posix()
}

_BANNED = """
afresh ahead anew apart asked basis beat book books chooser course desk doubt draft draw drawn
door doors entrant flight follower foretell foretold goal goals grave guard heard hello held home
judge judgement kept knock lateness learnt ledger leg legs lest loan loans mend miss news patience
proof rescue ripe rounds said seen shelf shots siblings sight sleepers spot stated stories story
sweep tell tells there told twin unlike visit visitor wanted warden whatever wish wishes
"""
BANNED = frozenset(_BANNED.split())
"""Words of everyday language that once stood for a standard term, or for several."""

ALLOWED = {
    "in_flight": "requests that are being served, as in Envoy and gRPC",
    "ahead_from": "the CRD field aheadFromTokens",
    "sweep": "a parameter sweep",
    "event_loop": "asyncio",
    "draw": "what a chart does",
}
"""Standard terms that contain a banned word."""

_BANNED_IN_TESTS = """
asked door doors foretold goal goals nobody stated tell tells told unlike wanted whatever
"""
BANNED_IN_TESTS = frozenset(_BANNED_IN_TESTS.split())
"""Banned in every identifier outside the packages: locals, parameters, helpers and tests, too."""

ALLOWED_IN_TESTS = {
    "foretold_by": "a column and JSON key of benchmarks/lengths",
    "of_stated": "a JSON key of benchmarks/kv/limited_bandwidth.py",
}
"""Identifiers that are part of an output's format."""

SHARED_CLASS_NAMES: set[str] = set()
"""Public class names that may stand in two modules."""

_VERBS = """
abandon abort accept accepts account accumulate acquire add admit adopt advance aggregate allocate
allows annotate applies apply are assess assign attribute authenticate batch become begin bind
bisect bound buffer build call can cancel carry change changes characterize charge check
choose chunk claim clamp classify clean clear clip clone close collect color compare
compile complete compute computes configure confirm connect construct consume contain contains
convert copy correct count create cross cut decide declare decline decode defer delete delimit
deliver depends describe detach detect dial disable discard discount discover dispatch divide do
drain draw drop dump echo emit enable encode end ends enqueue enter enumerate estimate
evict exchange exclude execute exit expand expect expire explain export extend extract fail feed
fetch fill filter find finish fit fits flush fold force forecast forget form format forward free
freeze generate get give goes grant group grow guess halve handle has hash holds ignore import index
inspect interpolate interrupt intersect invalidate invoke is issue iter iterate join keep keeps
key kill knows lay learn limit link list listen load locate lock log lower main make map mark
marks mask match matches maximize may measure merge misses name narrow needs normalize
notify number observe open optimize order pack pair parse patch pause peek pick plan poll pop post
predict preempt prefer prefers prefill prepare prepend print probe process profile promote propose
provision proxy prune publish pull push query raise rank read reap rebuild receive reclaim
recompute reconcile record reduce refer refit refresh refuse register reject rejects renew
release relist reload remove render replace report repurpose request requeue require
resample reserve reset resign resize resolve respond restart restore restrict resume resync retain
retire retry return review revise rewrite rotate round run sample sanitize save scale
scan schedule score scrape select send separate serve serves set settle share shorten should
show shrink shutdown sign signal simulate skip sleep slice solve sort spawn split start step stop
store stream strip submit subtract suggest sum summarize supervise supports swap sync synchronize
tabulate tail take terminate test tick time transfer trim truncate try
unpack unwrap update upsert validate verify view wait wake walk warm was watch work write
"""
VERBS = frozenset(_VERBS.split())
"""First words of functions. A new verb is added here; a noun is a property or a variable."""

PREFIXES = {"as", "for", "from", "in", "on", "to", "with", "without"}
"""First words of alternative constructors, conversions, event handlers and context managers."""

_CALLED_BY_NAME = """
Check Drain Fleet Health Name Pick Process RecordPairs Release SetRole Watch cleave connection_lost
connection_made data_received demo down eof_received error formatMessage gateway
intercept_service logs operator profile rollout status top up workload
"""
CALLED_BY_NAME = frozenset(_CALLED_BY_NAME.split())
"""Functions whose name a library prescribes: asyncio, gRPC, logging, click."""

_SCENARIOS = """
test_adapters test_against_emulator test_against_reference test_attacks test_convergence
test_broken_engines test_charges_emulated test_different_shapes test_dispatch
test_event_loop_pauses test_fuzz_engines test_fuzz_blocks test_fuzz_heads test_fuzz_http
test_in_browser
test_later_messages test_lifecycle test_logs test_main test_others
test_published_results test_queries test_recovery_emulated test_recovery_rules test_role_change
test_rollback test_rollout_histories test_same_picks test_scale_from_zero test_scaling_convergence
test_scheduling_limits test_siblings_end_to_end test_skew test_smuggling test_vllm_interfaces
test_weights_rollout test_parser_differences test_fuzz_translated_streams
"""
SCENARIOS = frozenset(_SCENARIOS.split())
"""Tests of what several modules do together; all others are named for the module they test."""


def split_words(name: str) -> list[str]:
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return [word for word in snake.split("_") if word]


def find_banned(name: str) -> list[str]:
    words = "_".join(split_words(name))
    for allowed in ALLOWED:
        words = words.replace(allowed, "")
    return [word for word in words.split("_") if word in BANNED]


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def iter_definitions(
    module: str, kinds: type[ast.AST] | tuple[type[ast.AST], ...]
) -> Iterator[tuple[str, ast.AST]]:
    """What stands at the top of a module or of a class; functions inside functions are private."""
    queue: list[ast.AST] = [parse(module)]
    while queue:
        for node in ast.iter_child_nodes(queue.pop()):
            if isinstance(node, kinds):
                yield f"{module}:{node.lineno} {node.name}", node
            if isinstance(node, ast.ClassDef | ast.If | ast.Try):
                queue.append(node)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"\.?(command|group)\b", ast.unparse(d)) for d in function.decorator_list)


def test_no_module_has_a_private_word() -> None:
    assert not [name for name in MODULES if find_banned(name.rpartition(".")[2])]


def test_no_class_or_function_has_a_private_word() -> None:
    wrong = []
    for module in MODULES:
        for where, node in iter_definitions(module, (ast.ClassDef, *FUNCTIONS)):
            if find_banned(node.name):
                wrong.append(where)
    assert not wrong


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "e2e", "scripts"])
def test_no_identifier_outside_the_packages_has_a_private_word(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if ".venv" in path.parts:  # e2e/clients has an environment of its own.
            continue
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if (
                    token.type == tokenize.NAME
                    and token.string not in ALLOWED_IN_TESTS
                    and BANNED_IN_TESTS.intersection(split_words(token.string))
                ):
                    where = f"{path.relative_to(ROOT).as_posix()}:{token.start[0]}"
                    wrong.append(f"{where} {token.string}")
    assert not wrong


def test_each_public_class_name_stands_in_one_module() -> None:
    modules = defaultdict(set)
    for module in MODULES:
        for _, node in iter_definitions(module, ast.ClassDef):
            modules[node.name.lstrip("_")].add(module)
    twice = {name: sorted(where) for name, where in modules.items() if len(where) > 1}
    assert twice.keys() == SHARED_CLASS_NAMES, twice


def test_functions_begin_with_a_verb() -> None:
    wrong = []
    for module in MODULES:
        for where, node in iter_definitions(module, FUNCTIONS):
            if is_property(node) or is_command(node) or node.name.startswith("__"):
                continue
            first = split_words(node.name)[0]
            if first not in VERBS | PREFIXES and node.name not in CALLED_BY_NAME:
                wrong.append(where)
    assert not wrong


def test_every_verb_and_every_exception_is_used() -> None:
    functions = {node.name for m in MODULES for _, node in iter_definitions(m, FUNCTIONS)}
    assert not VERBS - {split_words(name)[0] for name in functions}
    assert not CALLED_BY_NAME - functions
    assert not SCENARIOS - {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports under TYPE_CHECKING count: a circle of types is read like any other."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the circle


def test_no_folder_is_longer_than_a_screen() -> None:
    folders = defaultdict(int)
    for path in MODULES.values():
        folders[path.parent.relative_to(ROOT).as_posix()] += 1
    # The simulator compiles as one: its modules are the steps of one loop.
    assert not [f for f, n in folders.items() if n > (25 if f.endswith("/simulator") else 21)]


def test_the_tests_stand_where_what_they_test_stands() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        parts = path.relative_to(ROOT / "tests").parts
        if parts[0] in ("benchmarks", "packaging", "promql", "repository", "support"):
            continue
        source = (
            PACKAGES["cleave_worker"].joinpath(*parts[1:-1])
            if parts[0] == "worker"
            else PACKAGES["cleave"].joinpath(*parts[:-1])
        )
        subject = path.stem.removeprefix("test_")
        names = {each.stem for each in source.glob("*")} | {source.name}
        named = any(subject == name or subject.startswith(f"{name}_") for name in names)
        if not source.is_dir() or not (named or path.stem in SCENARIOS):
            wrong.append(path.relative_to(ROOT).as_posix())
    assert not wrong
