"""Moves modules: move.py ROOT moves.tsv... [--tests] [--dry-run] [--report FILE]"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from edits import Edits
from project import TOPS, Project
from scopes import BUILTINS, File

NOTES: list[str] = []
TEXT_SUFFIXES = {".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".css", ".js", ".go", ".c", ".h", ".proto", ".tpl", ""}


def note(kind: str, text: str) -> None:
    NOTES.append(f"{kind}\t{text}")


def read_moves(paths: list[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    moves, new = [], []
    for table in paths:
        for number, line in enumerate(Path(table).read_text().splitlines(), 1):
            cells = [c.strip().strip("`") for c in line.split("\t")]
            if not line.strip() or line.startswith("#"):
                continue
            if len(cells) < 2:
                note("bad line", f"{table}:{number}: {line}")
            elif cells[0] == "NEW":
                new.append((cells[1], cells[2] if len(cells) > 2 else ""))
            else:
                moves.append((cells[0], cells[1]))
    return moves, new


def check(project: Project, moves):
    good, sources, targets = [], {}, {}
    existing = set(project.files)
    # A path may be the target of another table: the moves are joined.
    first = {}
    for old, new in moves:
        if old in existing:
            first.setdefault(old, new)
    later = {old: new for old, new in moves if old not in existing}
    joined = []
    for old, new in moves:
        hops = 0
        while old in existing and new in later and hops < 5:
            note("joined", f"{old} -> {new} -> {later[new]}")
            new = later[new]
            hops += 1
        if old not in existing and old in first.values():
            continue
        joined.append((old, new))
    moves = joined
    mirrors = {}
    for old, new in moves:
        a, b = test_folder(old), test_folder(new)
        if a and b and old in existing and a[1] != "__init__":
            mirrors[f"{a[0]}/test_{a[1]}.py"] = f"{b[0]}/test_{b[1]}.py"
    packages = {}
    for old, new in moves:
        a, b = test_folder(old), test_folder(new)
        if a and b and a[1] == "__init__" and a[0] != b[0]:
            packages[a[0]] = b[0]
    joined = []
    for old, new in moves:
        if old.startswith("tests/") and new not in existing:
            if new in mirrors:
                note("mirrored", f"{old} -> {mirrors[new]} instead of {new}")
                new = mirrors[new]
            elif str(Path(new).parent) in packages:
                new = f"{packages[str(Path(new).parent)]}/{Path(new).name}"
        joined.append((old, new))
    moves = joined
    for old, new in moves:
        if old == new:
            continue
        if old not in existing:
            note("unknown path", f"{old} -> {new}")
        elif old in sources:
            if sources[old] != new:
                note("moved twice", f"{old} -> {sources[old]} and {new}; the first is done")
        elif new in targets:
            note("same target", f"{old} and {targets[new]} -> {new}; the first is done")
        else:
            sources[old] = new
            targets[new] = old
            good.append((old, new))
    for old, new in list(good):
        if new in existing and new not in sources:
            note("target exists", f"{old} -> {new}")
            good.remove((old, new))
    return good


def test_folder(path: str) -> tuple[str, str] | None:
    """Folder of the tests of a source's folder, and the module's name."""
    parts = path.removesuffix(".py").split("/")
    if parts[:2] == ["operator", "cleave"]:
        rest = parts[2:]
    elif parts[:2] == ["worker", "cleave_worker"]:
        rest = ["worker", *parts[2:]]
    else:
        return None
    return "/".join(["tests", *rest[:-1]]), rest[-1]


def test_moves(project: Project, moves, explicit: set[str]):
    """Tests that follow their modules, and what else lies in a folder whose package moves."""
    existing = set(project.files)
    found = {}
    for old, new in moves:
        a, b = test_folder(old), test_folder(new)
        if not a or not b:
            continue
        if a[1] == "__init__":
            if a[0] != b[0]:
                for f in project.files:
                    if f.startswith(a[0] + "/") and "/" not in f[len(a[0]) + 1 :]:
                        if not Path(f).name.startswith("test_"):
                            found.setdefault(f, f"{b[0]}/{Path(f).name}")
            continue
        test = f"{a[0]}/test_{a[1]}.py"
        target = f"{b[0]}/test_{b[1]}.py"
        if test in existing and test not in explicit and test != target:
            found[test] = target
    # Tests of a package that moves as a whole whose names mirror no module
    packages = {}
    for old, new in moves:
        a, b = test_folder(old), test_folder(new)
        if a and b and a[1] == "__init__":
            packages[a[0]] = b[0]
    for a, b in packages.items():
        for f in project.files:
            if f.startswith(a + "/") and "/" not in f[len(a) + 1 :] and f not in found and f not in explicit:
                found[f] = f"{b}/{Path(f).name}"
    out = []
    targets = {}
    for f, t in found.items():
        if f in explicit:
            continue
        if t in targets or (t in existing and t not in found):
            note("test not moved", f"{f} -> {t}: taken by {targets.get(t, 'a file')}")
            continue
        targets[t] = f
        out.append((f, t))
    return out


class Mover:
    def __init__(self, project: Project, moves):
        self.project = project
        self.paths = dict(moves)
        self.dotted = {}
        for old, new in moves:
            if old.endswith(".py") and old.split("/")[0] in TOPS:
                self.dotted[Project.name_of(old)] = Project.name_of(new)
        self.old_modules = {m for f, m in project.module.items() if f.split("/")[0] in TOPS}
        # short names: suffixes of two parts and more that mean one module only
        self.suffixes = defaultdict(set)
        for m in self.old_modules:
            parts = m.split(".")
            for i in range(1, len(parts) - 1):
                self.suffixes[".".join(parts[i:])].add(m)
        self.slashes = defaultdict(set)
        for f in project.python:
            parts = f.split("/")
            for i in range(1, len(parts) - 1):
                self.slashes["/".join(parts[i:])].add(f)

    # prose
    def map_dotted(self, text: str) -> str:
        """The longest moved prefix of a full dotted path replaced."""
        parts = text.split(".")
        for n in range(len(parts), 1, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.dotted:
                return ".".join([self.dotted[prefix], *parts[n:]])
            if prefix in self.old_modules and n > 1 and self.project.path_of.get(prefix, "").endswith(".py"):
                if not self.project.path_of[prefix].endswith("__init__.py"):
                    return text
        return text

    def map_short(self, text: str, module: str | None) -> str:
        """`policy.books.Queue` and `sibling` as docstrings name them."""
        parts = text.split(".")
        for n in range(len(parts), 1, -1):
            prefix = ".".join(parts[:n])
            owners = self.suffixes.get(prefix, set())
            if owners:
                old = self._nearest(owners, module)
                if old and old in self.dotted:
                    new = self.dotted[old]
                    drop = len(old.split(".")) - n
                    new_parts = new.split(".")[1:] if drop <= 1 else new.split(".")[1:]
                    # As few leading parts as the old text had, at least two.
                    keep = max(n, 2)
                    tail = new_parts[-keep:] if len(new_parts) > keep else new_parts
                    return ".".join([*tail, *parts[n:]])
                return text
        return text

    def _nearest(self, owners, module):
        if len(owners) == 1:
            return next(iter(owners))
        if module:
            def shared(o):
                n = 0
                for a, b in zip(o.split("."), module.split(".")):
                    if a != b:
                        break
                    n += 1
                return n

            best = sorted(owners, key=shared, reverse=True)
            if shared(best[0]) > shared(best[1]):
                return best[0]
        return None

    def map_slash(self, text: str) -> str:
        """Full or short path of a file that moves."""
        if text in self.paths:
            return self.paths[text]
        owners = self.slashes.get(text, set())
        if len(owners) == 1:
            old = next(iter(owners))
            if old in self.paths:
                head = old[: len(old) - len(text)]
                new = self.paths[old]
                if new.startswith(head):
                    return new[len(head) :]
                for top in ("operator/cleave/", "worker/cleave_worker/", "tests/"):
                    if new.startswith(top) and head.startswith(top):
                        return new[len(top) :]
                return new
        return text

    def map_folder(self, text: str) -> str:
        init = f"{text}/__init__.py"
        if init in self.paths:
            return self.paths[init].removesuffix("/__init__.py")
        return text

    def prose_edits(self, edits: Edits, path: str, spans=None):
        text = edits.text
        module = self.project.module.get(path)
        for m in re.finditer(r"(?<![\w./-])(?:cleave|cleave_worker)(?:\.\w+)+", text):
            if text[m.end() : m.end() + 1] == "/" or m.group().startswith("cleave.dev"):
                continue
            new = self.map_dotted(m.group())
            if new != m.group() and not edits.overlaps(*m.span()):
                edits.add(*m.span(), new)
        for m in re.finditer(r"[\w.-]*(?:/[\w.-]+)+\.py\b", text):
            word = m.group()
            for i in [0, *[k.start() + 1 for k in re.finditer("/", word)]]:
                part = word[i:]
                if "/" not in part:
                    break
                new = self.map_slash(part)
                if new != part:
                    span = (m.start() + i, m.end())
                    if not edits.overlaps(*span):
                        edits.add(*span, new)
                    break
        for m in re.finditer(r"(?:operator/cleave|worker/cleave_worker|tests)(?:/\w+)+(?![\w./])", text):
            new = self.map_folder(m.group())
            if new == m.group():
                stem = m.group() + ".py"
                new = self.map_slash(stem).removesuffix(".py")
            if new != m.group() and not edits.overlaps(*m.span()):
                edits.add(*m.span(), new)
        for m in re.finditer(r"`(\w+(?:\.\w+)+)(\(\))?`", text):
            if m.group(1).startswith(("cleave.", "cleave_worker.")):
                continue
            new = self.map_short(m.group(1), module)
            if new != m.group(1) and not edits.overlaps(*m.span(1)):
                edits.add(*m.span(1), new)

    def bare_edits(self, edits: Edits, path: str, file: File):
        """`sibling` in backticks: a module of the same package that gets another name."""
        module = self.project.module[path]
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        bound = file.module.bound
        for m in re.finditer(r"`(\w+)`", edits.text):
            old = f"{package}.{m.group(1)}"
            if old in self.dotted and m.group(1) not in bound:
                new = self.dotted[old]
                my_new = self.dotted.get(module, module)
                my_package = my_new if path.endswith("__init__.py") else my_new.rpartition(".")[0]
                last = new.split(".")[-1]
                text = last if new.rpartition(".")[0] == my_package else ".".join(new.split(".")[-2:])
                local = any(m.group(1) in s.bound for s in file.scopes if s.kind != "module")
                if local:
                    note("bare module?", f"{path}: `{m.group(1)}` left, it may mean {old}")
                    continue
                if text != m.group(1) and not edits.overlaps(*m.span(1)):
                    edits.add(*m.span(1), text)

    def is_package(self, path, dotted):
        return (self.project.resolve(path, dotted) or "").endswith("__init__.py")

    def moved(self, path, dotted):
        """The new name of a module as this file imports it; None: it stays, or is foreign."""
        if dotted.split(".")[0] in TOPS.values():
            return self.dotted.get(dotted)
        old = self.project.resolve(path, dotted)
        if not old or old not in self.paths or old.split("/")[0] in TOPS:
            return None
        new = self.paths[old]
        stem = lambda p: p.removesuffix(".py").removesuffix("/__init__")
        if stem(old).replace("/", ".") == dotted:
            return stem(new).replace("/", ".")
        tail = dotted.replace(".", "/")
        base = stem(old)[: -len(tail)]
        if stem(new).startswith(base):
            return stem(new)[len(base) :].replace("/", ".")
        note("helper import", f"{path}: {dotted} -> {new}: is its folder importable?")
        return Path(new).stem

    # imports
    def python(self, path: str) -> str:
        text = self.project.read(path)
        file = File(text)
        edits = Edits(text)
        statements = defaultdict(list)
        for entry in file.imports:
            statements[id(entry.node)].append(entry)
        renamed = {}  # (scope index, old bound) -> new bound
        wanted = []
        for entries in statements.values():
            node = entries[0].node
            if isinstance(node, ast.Import):
                for e in entries:
                    new = self.moved(path, e.alias.name) or self.map_dotted(e.alias.name)
                    if new != e.alias.name and "." not in new and not e.alias.asname:
                        renamed[e.scope.index, e.bound] = new
                    if new != e.alias.name:
                        edits.add(e.start, e.start + len(e.alias.name), new)
                        note("plain import", f"{path}:{node.lineno}: import {e.alias.name}")
                continue
            if node.level or not node.module:
                continue
            if node.module.split(".")[0] not in TOPS.values() and path.split("/")[0] in TOPS:
                continue
            whole = self.moved(path, node.module)
            if whole and not self.is_package(path, node.module):
                found = file._find(rf"from\s+({re.escape(node.module)})\b", file.start(node))
                edits.add(*found.span(1), whole)
                continue
            changed = [e for e in entries if self.moved(path, f"{node.module}.{e.alias.name}")]
            if not changed:
                if node.module in self.dotted and any(
                    f"{node.module}.{e.alias.name}" in self.old_modules for e in entries
                ):
                    note("import", f"{path}:{node.lineno}: from {node.module} import of a module that stays")
                continue
            wanted.append((node, entries))
        # New bound names, where the last part changes
        taken = {name for s in file.scopes for name in s.bound} | {
            o.name for o in file.occurrences if o.target is None
        }
        gone = set()
        claims = Counter()
        plans = []
        for node, entries in wanted:
            for e in entries:
                new = self.moved(path, f"{node.module}.{e.alias.name}")
                if new:
                    last = new.split(".")[-1]
                    claims[last] += not e.alias.asname
                    if not e.alias.asname and last != e.alias.name:
                        gone.add(e.bound)
                    plans.append((e, new, last))
        still = set()
        for s in file.scopes:
            for name, infos in s.bound.items():
                if name in gone and all(i and i[0] == "import" for i in infos):
                    continue
                still.add(name)
        aliases = {}
        for e, new, last in plans:
            if e.alias.asname:
                aliases[id(e)] = e.alias.asname
                continue
            if last == e.alias.name:
                aliases[id(e)] = None
                if claims[last] > 1 and len({n for _, n, l in plans if l == last}) > 1:
                    aliases[id(e)] = self._alias(new, still, path, e)
                    renamed[e.scope.index, e.bound] = aliases[id(e)]
                continue
            distinct = {n for x, n, l in plans if l == last and not x.alias.asname}
            if last in still or len(distinct) > 1 or (last in BUILTINS):
                bound = self._alias(new, still, path, e)
                aliases[id(e)] = bound
            else:
                bound = last
                aliases[id(e)] = None
            renamed[e.scope.index, e.bound] = bound
        for node, entries in wanted:
            groups = defaultdict(list)
            for e in entries:
                full = self.moved(path, f"{node.module}.{e.alias.name}")
                if full:
                    package, _, last = full.rpartition(".")
                    alias = aliases[id(e)]
                    groups[package].append(f"{last} as {alias}" if alias and alias != last else last)
                else:
                    package = self.dotted.get(node.module, node.module)
                    groups[package].append(
                        f"{e.alias.name} as {e.alias.asname}" if e.alias.asname else e.alias.name
                    )
            indent = " " * node.col_offset
            lines = [f"from {p} import {', '.join(sorted(set(names)))}" for p, names in sorted(groups.items())]
            line_end = text.find("\n", file.end(node))
            kept = re.search(r"# noqa: \w+", text[file.start(node) : line_end])
            if kept:
                inside = kept.group() in text[file.start(node) : file.end(node)]
                lines = [f"{line}  {kept.group()}" if inside or i < len(lines) - 1 else line for i, line in enumerate(lines)]
            edits.add(file.start(node), file.end(node), f"\n{indent}".join(lines))
        for (scope, bound), new in renamed.items():
            for o in file.by_binding.get((scope, bound), []):
                if o.kind != "import":
                    edits.add(o.start, o.start + len(bound), new)
        if path.split("/")[0] in TOPS:
            self.bare_edits(edits, path, file)
        self.bound_prose(edits, file, renamed)
        self.prose_edits(edits, path)
        return edits.apply()

    def bound_prose(self, edits, file, renamed):
        """`door.Door` in backticks where the file had imported door."""
        for (_, bound), new in renamed.items():
            for m in re.finditer(rf"`({bound})\.", edits.text):
                if not edits.overlaps(*m.span(1)):
                    edits.add(*m.span(1), new)

    def _alias(self, new, still, path, entry):
        parts = new.split(".")
        for candidate in (f"{parts[-2]}_{parts[-1]}", entry.bound):
            if candidate not in still or candidate == entry.bound:
                note("alias", f"{path}: {new} as {candidate}")
                return candidate
        return entry.bound

    # particular files
    def compile_script(self, text: str) -> str:
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MODULES":
                old = ast.literal_eval(node.value)
                new = defaultdict(list)
                for package, modules in old.items():
                    for module in modules.split():
                        full = f"cleave.{package}.{module}"
                        if full not in self.old_modules:
                            note("compile", f"scripts/compile.py names {full}")
                        full = self.dotted.get(full, full)
                        p, _, m = full.removeprefix("cleave.").rpartition(".")
                        new[p].append(m)
                lines = ["MODULES = {"]
                for p in sorted(new):
                    words = " ".join(sorted(new[p]))
                    if len(words) < 80:
                        lines.append(f'    "{p}": "{words}",')
                    else:
                        lines.append(f'    "{p}": (')
                        row = ""
                        for w in sorted(new[p]):
                            piece = (" " if row or lines[-1] != f'    "{p}": (' else "") + w
                            if len(row) + len(piece) > 75:
                                lines.append(f'        "{row}"')
                                row = " " + w
                            else:
                                row += piece
                        lines.append(f'        "{row}"')
                        lines.append("    ),")
                lines.append("}")
                rows = text.splitlines()
                return "\n".join(rows[: node.lineno - 1] + lines + rows[node.end_lineno :]) + "\n"
        return text

    def pyproject(self, text: str) -> str:
        """Layers of import-linter, and folders of pytest's pythonpath."""
        out = text
        for block in re.finditer(r'containers = \["([\w.]+)"\](.*?)layers = \[(.*?)\n\]', text, re.S):
            container, body = block.group(1), block.group(3)
            seen = set()
            lines = []
            touched = False
            for line in body.splitlines():
                m = re.match(r'(\s*)"(.*)",', line)
                if not m:
                    lines.append(line)
                    continue
                items = []
                for item in m.group(2).split(" | "):
                    prefix = f"{container}.{item}"
                    targets = set()
                    remains = False
                    for module in self.old_modules:
                        if module == prefix or module.startswith(prefix + "."):
                            full = self.dotted.get(module, module)
                            if full.startswith(container + "."):
                                targets.add(full[len(container) + 1 :].split(".")[0])
                            if module not in self.dotted and module != prefix:
                                remains = True
                    for t in sorted(targets, key=lambda t: (t != item, t)):
                        if t not in seen:
                            seen.add(t)
                            items.append(t)
                    touched = touched or targets != {item}
                if items:
                    lines.append(f'{m.group(1)}"{" | ".join(items)}",')
            if touched:
                note("layers", f"pyproject.toml: layers of {container} rewritten, check their order")
                out = out.replace(body, "\n".join(lines))
        folders = {}
        for old, new in self.paths.items():
            if old.startswith("tests/") and old.endswith(".py"):
                folders.setdefault(str(Path(old).parent), set()).add(str(Path(new).parent))
        return out


def fix_depth(text: str, old: str, new: str) -> str:
    delta = new.count("/") - old.count("/")
    if not delta or "__file__" not in text:
        return text

    def parents(m):
        return f"{m.group(1)}parents[{int(m.group(2)) + delta}]"

    fixed = re.sub(r"(Path\(__file__\)(?:\.resolve\(\))?\.)parents\[(\d+)\]", parents, text)

    def chain(m):
        n = m.group(2).count(".parent") - 1 + delta
        return f"{m.group(1)}.parents[{n}]" if n > 0 else f"{m.group(1)}.parent"

    fixed2 = re.sub(r"(Path\(__file__\)(?:\.resolve\(\))?)((?:\.parent)+)(?![\w\[])", lambda m: chain(m) if m.group(2).count(".parent") > 1 else m.group(), fixed)
    note("depth", f"{old} -> {new}: __file__ {'adjusted' if fixed2 != text else 'NOT adjusted, check'}")
    return fixed2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-format", action="store_true")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--applied", type=Path, default=Path("build/rename/applied_moves.tsv"))
    options = parser.parse_args()
    project = Project(options.root)
    root = project.root
    moves, new = read_moves(options.tables)
    moves = check(project, moves)
    explicit = {o for o, _ in moves}
    if options.tests:
        moves += test_moves(project, moves, explicit)
    mover = Mover(project, moves)
    options.applied.parent.mkdir(parents=True, exist_ok=True)
    options.applied.write_text("".join(f"{o}\t{n}\n" for o, n in moves))
    changed = {}
    for f in project.files:
        if f.startswith("operator/cleave/rpc/v1/") or f in ("uv.lock", "e2e/clients/uv.lock", "CHANGELOG.md"):
            if f != "CHANGELOG.md":
                continue
        path = root / f
        if f.endswith(".py"):
            text = project.read(f)
            try:
                out = mover.python(f)
            except Exception as error:
                note("failed", f"{f}: {error!r}")
                continue
            if f == "scripts/compile.py":
                out = mover.compile_script(out)
            if f in mover.paths:
                out = fix_depth(out, f, mover.paths[f])
        else:
            if path.suffix not in TEXT_SUFFIXES and path.suffix != ".pyi":
                continue
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue
            edits = Edits(text)
            mover.prose_edits(edits, f)
            out = edits.apply()
            if f == "pyproject.toml":
                out = mover.pyproject(out)
        if out != text:
            changed[f] = out
    if not options.dry_run:
        for f, out in changed.items():
            (root / f).write_text(out)
        # In two steps, for one's new path may be another's old one.
        for i, (old, _) in enumerate(moves):
            subprocess.run(["git", "mv", old, f"{old}.moving{i}"], cwd=root, check=True)
        for i, (old, target) in enumerate(moves):
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", f"{old}.moving{i}", target], cwd=root, check=True)
        for target, docstring in new:
            path = root / target
            if path.exists():
                note("new exists", target)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            name = path.parent.name.replace("_", " ")
            path.write_text(f'"""{docstring or name.capitalize() + "."}"""\n')
            subprocess.run(["git", "add", target], cwd=root, check=True)
        for top, package in TOPS.items():
            for folder in sorted({p.parent for p in (root / top / package).rglob("*.py")}):
                if not (folder / "__init__.py").exists() and folder.name != "__pycache__":
                    rel = folder.relative_to(root)
                    note("no __init__", f"{rel}: made")
                    (folder / "__init__.py").write_text(f'"""{folder.name.replace("_", " ").capitalize()}."""\n')
                    subprocess.run(["git", "add", str(rel / "__init__.py")], cwd=root, check=True)
                files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
                if [p.name for p in files] == ["__init__.py"]:
                    note("empty package", f"{folder.relative_to(root)}: removed")
                    subprocess.run(["git", "rm", "-qf", str((folder / "__init__.py").relative_to(root))], cwd=root, check=True)
        for old, _ in moves:
            folder = (root / old).parent
            while folder != root and folder.exists():
                rest = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
                if rest:
                    break
                import shutil

                shutil.rmtree(folder)
                folder = folder.parent
        if not options.no_format:
            ruff = str(root / ".venv" / "bin" / "ruff")
            subprocess.run([ruff, "check", "-q", "--select", "I,RUF022,RUF023", "--fix", "."], cwd=root)
            subprocess.run([ruff, "format", "-q", "."], cwd=root)
            from wrap import wrap

            wrap(root)
    # pythonpath folders that lost or changed their files
    for folder in project.pythonpath:
        leaving = [(o, n) for o, n in moves if str(Path(o).parent) == folder and not Path(o).name.startswith("test_")]
        for o, n in leaving:
            note("pythonpath", f"{o} -> {n}: helper of pythonpath entry {folder}")
    report = "\n".join(sorted(NOTES)) + "\n"
    if options.report:
        options.report.write_text(report)
    print(f"{len(moves)} moves, {len(changed)} files changed, {len(NOTES)} notes")
    counts = Counter(n.split("\t")[0] for n in NOTES)
    print(dict(counts))
    if not options.report:
        print(report)


if __name__ == "__main__":
    main()
