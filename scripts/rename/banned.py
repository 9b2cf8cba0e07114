"""Counts what is left of the private words: banned.py ROOT [--list]"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

BANNED = set(
    """told tell tells said say heard hear there goals goal wanted asked stated kept held seen known found made place places placed turn turns
    follow follows follower followers following terms way ways look looks looked note noted notes whole single split apart left course basis doubt doubted away home pass passes anew
    lest foretell foretold learnt unlike door doors visit entrant lateness ahead rescue outbox siblings sibling stories story leg legs tries
    watched board boards line lines wish chooser ledger book books desk grave sweep keeper holds hold news visitor hello welcome meet met beat spot
    loan flight warden proof sight patience tiles twin shelf ripe orders draft judge judgement shown running outlook mend digest question answer answers
    rounds shots front knock miss""".split()
)
# Words of the field among them, which count only as a module or class of their own (the review's hand-curated list left them out).
MILD = set("single running pass passes line lines left note notes known way watched digest answer answers whole split front place hold line miss question look away home".split())
LIST = BANNED - MILD
PARTICIPLES = set(
    """told kept held said heard seen known found made met left lent sent given taken shown written read_ built lost done gone stood put set_ learnt spent drawn
    fallen chosen grown paid bound""".split()
)
VERBS_ED = {"need", "feed", "seed", "speed", "shed", "embed", "exceed", "proceed", "succeed", "bleed", "red", "bed"}


MODULE_WORDS = set(
    """asking finding recovering guard bench draft seen following counting sleepers possible faulty shrink choosing forming completing admitting flipping
    prepared words rating obstacles audience saver announcing places place placing repurposing opening opened provisioning tuning splitting pooling
    stories story refused measured corrected trust summed exchanges exchange directory last patience share sight proof doors rounds shots""".split()
)


def words(name):
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return [w for w in name.lower().strip("_").split("_") if w]


def has_private(name, banned):
    hit = [w for w in words(name) if w in banned]
    if "last" in words(name) and "words" in words(name):
        hit.append("last_words")
    return hit


def participle(name):
    first = words(name)[0] if words(name) else ""
    if len(words(name)) > 2:
        return False
    if first in PARTICIPLES:
        return True
    return len(words(name)) == 1 and first.endswith("ed") and first not in VERBS_ED and len(first) > 4


def cycles(graph):
    """Strongly connected parts with more than one member."""
    index, low, stack, on, out = {}, {}, [], set(), []
    sys.setrecursionlimit(10_000)

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        on.add(v)
        for w in graph.get(v, ()):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in on:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = []
            while True:
                w = stack.pop()
                on.discard(w)
                part.append(w)
                if w == v:
                    break
            if len(part) > 1:
                out.append(sorted(part))

    for v in list(graph):
        if v not in index:
            visit(v)
    return out


def main():
    root = Path(sys.argv[1]).resolve()
    show = "--list" in sys.argv
    files = []
    for top, package in (("operator", "cleave"), ("worker", "cleave_worker")):
        for p in sorted((root / top / package).rglob("*.py")):
            if "/rpc/v1/" not in p.as_posix() and "__pycache__" not in p.parts:
                files.append(p)
    modules = [p for p in files if p.name != "__init__.py"]
    name_of = {}
    for p in files:
        parts = list(p.relative_to(root).with_suffix("").parts[1:])
        if parts[-1] == "__init__":
            parts.pop()
        name_of[p] = ".".join(parts)
    known = set(name_of.values())
    print(f"{len(modules)} modules")
    for label, banned in (("narrow", LIST), ("whole list", BANNED)):
        bad_modules = [(name_of[p], has_private(p.stem, banned | MODULE_WORDS)) for p in modules if has_private(p.stem, banned | MODULE_WORDS)]
        functions = total = part = 0
        bad_functions, bad_part, bad_classes, bad_names = [], [], [], defaultdict(Counter)
        classes = 0
        for p in modules:
            tree = ast.parse(p.read_text())
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    if node.name.startswith("__"):
                        continue
                    total += 1
                    is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
                    if hit := has_private(node.name, banned):
                        bad_functions.append((f"{name_of[p]}:{node.lineno} {node.name}", hit))
                    if participle(node.name) and not is_property:
                        bad_part.append(f"{name_of[p]}:{node.lineno} {node.name}")
                    for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                        if has_private(a.arg, banned):
                            bad_names["parameter"][f"{name_of[p]} {a.arg}"] += 1
                elif isinstance(node, ast.ClassDef):
                    classes += 1
                    if hit := has_private(node.name, banned):
                        bad_classes.append((f"{name_of[p]}:{node.lineno} {node.name}", hit))
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    if has_private(node.id, banned):
                        bad_names["local or constant"][f"{name_of[p]} {node.id}"] += 1
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    if has_private(node.attr, banned):
                        bad_names["attribute"][f"{name_of[p]} {node.attr}"] += 1
        print(f"\n== words: {label} ({len(banned)})")
        print(f"(a) modules: {len(bad_modules)} of {len(modules)} = {100 * len(bad_modules) / len(modules):.1f} %")
        print(f"(b) functions: {len(bad_functions)} of {total} = {100 * len(bad_functions) / total:.1f} %; participles {len(bad_part)} = {100 * len(bad_part) / total:.1f} %")
        print(f"(c) classes: {len(bad_classes)} of {classes} = {100 * len(bad_classes) / classes:.1f} %")
        for kind, counter in bad_names.items():
            print(f"    {kind}s: {len(counter)} distinct by module, {sum(counter.values())} stores")
        if show:
            for title, rows in (("modules", bad_modules), ("functions", bad_functions), ("classes", bad_classes)):
                print(f"  -- {title}")
                for name, hit in rows:
                    print(f"     {name}  ({', '.join(hit)})")
            for kind, counter in bad_names.items():
                print(f"  -- {kind}s")
                for name, n in sorted(counter.items()):
                    print(f"     {name} x{n}")
            if label == "narrow":
                print("  -- participles")
                for name in bad_part:
                    print(f"     {name}")
    # (d)
    where = defaultdict(set)
    for p in modules:
        for node in ast.walk(ast.parse(p.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].add(name_of[p])
    twice = {n: m for n, m in where.items() if len(m) > 1}
    print(f"\n(d) class names in two or more modules: {len(twice)} ({sum(len(m) > 2 for m in twice.values())} in three or more)")
    if show:
        for n, m in sorted(twice.items(), key=lambda x: -len(x[1])):
            print(f"     {n}: {', '.join(sorted(m))}")
    # (e)
    folders = Counter(p.parent.relative_to(root).as_posix() for p in modules)
    print("(e) largest folders: " + ", ".join(f"{f} {n}" for f, n in folders.most_common(6)))
    # (f)
    told = everything = 0
    for p in files:
        text = p.read_text()
        w = [x.lower() for x in re.findall(r"[A-Za-z]+", text)]
        everything += len(w)
        told += sum(x in ("tell", "tells", "told", "telling") for x in w)
    print(f"(f) tell/told: {told} in {everything} words = {10_000 * told / everything:.1f} per 10,000")
    # (g)
    graph = defaultdict(set)
    for p in files:
        me = name_of[p]
        for node in ast.walk(ast.parse(p.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for a in node.names:
                    target = f"{node.module}.{a.name}"
                    target = target if target in known else node.module
                    if target in known and target != me:
                        graph[me].add(target)
            elif isinstance(node, ast.Import):
                for a in node.names:
                    if a.name in known and a.name != me:
                        graph[me].add(a.name)
    found = cycles(graph)
    print(f"(g) circles of imports, types included: {len(found)}")
    for part in found:
        print(f"     {len(part)}: {', '.join(part)}")


if __name__ == "__main__":
    main()
