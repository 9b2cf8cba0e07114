"""Renames: rename.py ROOT renames.tsv... [--moves moves.tsv...] [--dry-run] [--oracle FILE] [--out DIR]"""

import argparse
import ast
import io
import pickle
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

from edits import Edits
from project import TOPS, Project
from scopes import BUILTINS, File

WORD = re.compile(r"^[A-Za-z_]\w*$")


class Renamer:
    def __init__(self, project: Project, oracle: dict) -> None:
        self.project = project
        self.oracle = oracle
        self.notes: dict[str, None] = {}
        self.sources = [f for f in project.sources]
        self.texts = {f: project.read(f) for f in self.sources}
        self.file = {f: File(t) for f, t in self.texts.items()}
        self.mod = project.module
        self.path_of = project.path_of
        self._index_classes()
        self.rename: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.dropped: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}

    def note(self, kind, text):
        self.notes[f"{kind}\t{text}"] = None

    # ---- index
    def _index_classes(self):
        self.cid = {}  # mypy fullname -> id
        self.class_scope = {}  # id -> (path, node, scope)
        for f in self.sources:
            data = self.oracle["files"].get(f)
            for node, scope in self.file[f].classes:
                ident = f"{self.mod[f]}:{scope.qual}"
                self.class_scope[ident] = (f, node, scope)
                if data:
                    full = data["classes"].get(node.lineno)
                    if full is None:
                        for d in node.decorator_list:
                            full = full or data["classes"].get(d.lineno)
                    if full:
                        self.cid[full] = ident
        self.names = {}  # class id -> names defined there
        self.mro = {}
        self.kinds = {}
        self.init = {}
        for full, info in self.oracle["infos"].items():
            ident = self.cid.get(full)
            if ident is None:
                continue
            self.names[ident] = {n for n, gen in info["names"].items() if not gen}
            self.mro[ident] = [self.cid.get(b, b) for b in info["mro"]]
            self.kinds[ident] = info["kinds"]
            init = info["init"]
            self.init[ident] = (self.cid.get(init[0], init[0]), init[1]) if init else None
        # fields that mypy makes for properties of plugins are absent: add what the class body binds
        for ident, (_, _, scope) in self.class_scope.items():
            self.names.setdefault(ident, set()).update(n for n in scope.bound)
            self.mro.setdefault(ident, [ident])
            self.kinds.setdefault(ident, set())
        self.external = {full: set(i["names"]) for full, i in self.oracle["infos"].items() if full not in self.cid}
        self.attrs = defaultdict(set)  # attr name -> ids
        for ident, names in self.names.items():
            for n in names:
                self.attrs[n].add(f"{ident}.{n}")
        self.globals = defaultdict(set)  # module-level name -> ids
        for f in self.sources:
            for n, infos in self.file[f].module.bound.items():
                if any(not (i and i[0] == "import") for i in infos):
                    self.globals[n].add(f"{self.mod[f]}:{n}")
        self.functions = {}  # id -> (path, node, inner scope)
        for f in self.sources:
            for node, scope, inner in self.file[f].functions:
                self.functions[f"{self.mod[f]}:{inner.qual}"] = (f, node, inner)
        self.params = defaultdict(set)
        for ident, (_, node, _) in self.functions.items():
            for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                self.params[a.arg].add(f"{ident}:{a.arg}")
        self.ext_names = set()
        for data in self.oracle["files"].values():
            for pos, found in data["members"].items():
                for kind, name in found or ():
                    if kind == "class" and name not in self.cid:
                        self.ext_names.add((name, pos))
        names = set()
        for f, data in self.oracle["files"].items():
            by_pos = {}
            for pos, found in data["members"].items():
                if found and any(k == "class" and n not in self.cid for k, n in found):
                    by_pos[pos] = 1
            if by_pos and f in self.file:
                for node, at, scope in self.file[f].attributes:
                    if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) in by_pos:
                        names.add(node.attr)
        self.ext_names = names
        self.uniq_class = defaultdict(set)
        for ident in self.class_scope:
            self.uniq_class[ident.split(":")[1].split(".")[-1]].add(ident)
        self.suffix = defaultdict(set)
        for m in self.path_of:
            if m.startswith(("cleave.", "cleave_worker.")):
                parts = m.split(".")
                for i in range(len(parts)):
                    self.suffix[".".join(parts[i:])].add(m)

    def fullname_id(self, full):
        """mypy's name of a function or class -> id."""
        if full in self.cid:
            return self.cid[full]
        parts = full.split(".")
        for n in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.cid:
                return f"{self.cid[prefix]}.{'.'.join(parts[n:])}"
        for n in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.path_of:
                return f"{prefix}:{'.'.join(parts[n:])}"
        return None

    def lookup_attr(self, cls, name):
        """Id of an attribute of a class, in its first base that has it; None: not ours."""
        for base in self.mro.get(cls, [cls]):
            if base in self.names:
                if name in self.names[base]:
                    return f"{base}.{name}"
            elif name in self.external.get(base, ()):
                return None
        return None

    # ---- resolution of names
    def resolve_import(self, path, entry, depth=0):
        """('module', path) or ('id', id) or None."""
        if entry.module is None:
            name = entry.alias.name if entry.alias.asname else entry.alias.name.split(".")[0]
            found = self.project.resolve(path, name)
            return ("module", found) if found else None
        if entry.module.startswith("."):
            return None
        sub = self.project.resolve(path, f"{entry.module}.{entry.alias.name}")
        if sub:
            return ("module", sub)
        owner = self.project.resolve(path, entry.module)
        if not owner:
            return None
        return self.member_of_module(owner, entry.alias.name, depth)

    def member_of_module(self, owner, name, depth=0):
        if owner not in self.file or depth > 5:
            return None
        infos = self.file[owner].module.bound.get(name)
        if infos is None:
            return None
        own = [i for i in infos if not (i and i[0] == "import")]
        if own:
            return ("id", f"{self.mod[owner]}:{name}")
        return self.resolve_import(owner, infos[0][1], depth + 1)

    def binding(self, path, scope, name):
        """What a bound name means: ('module', path), ('id', id) or None."""
        infos = scope.bound.get(name) or []
        imports = [i[1] for i in infos if i and i[0] == "import"]
        if imports and len(imports) == len(infos):
            return self.resolve_import(path, imports[0])
        m = self.mod[path]
        if scope.kind == "module":
            return ("id", f"{m}:{name}")
        if scope.kind == "class":
            return ("id", f"{m}:{scope.qual}.{name}")
        if any(i and i[0] == "param" for i in infos):
            return ("id", f"{m}:{scope.qual}:{name}")
        return ("id", f"{m}:{scope.qual}.<locals>.{name}")

    def resolve_expr(self, path, node, scope):
        if isinstance(node, ast.Name):
            target = self.file[path].lookup(scope, node.id)
            return self.binding(path, target, node.id) if target else None
        if isinstance(node, ast.Attribute):
            base = self.resolve_expr(path, node.value, scope)
            if base is None:
                return None
            if base[0] == "module":
                sub = self.path_of.get(f"{self.mod[base[1]]}.{node.attr}")
                return ("module", sub) if sub else self.member_of_module(base[1], node.attr)
            if base[1] in self.class_scope:
                found = self.lookup_attr(base[1], node.attr)
                return ("id", found) if found else None
        return None

    # ---- tables
    def load(self, table, moves):
        for number, line in enumerate(Path(table).read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            cells = [c.strip().strip("`") for c in line.split("\t")]
            where = f"{table}:{number}"
            if len(cells) < 3 or not WORD.match(cells[2]):
                self.note("bad line", f"{where}: {line}")
                continue
            path, qual, new = moves.get(cells[0], cells[0]), cells[1].replace("()", ""), cells[2]
            force = "force" in cells[3:]
            if path not in self.file:
                self.note("unknown path", f"{where}: {cells[0]} {qual}")
                continue
            found = self.entry(path, qual)
            if not found:
                near = self._near(path, qual)
                self.note("unknown name", f"{where}: {cells[0]} {qual} -> {new}{near}")
                continue
            kind, ident = found
            if kind == "dtype":
                self.dtypes[ident] = new
                continue
            old = ident.split(":")[-1].split(".")[-1]
            if old == new:
                continue
            if reason := self.refuse(ident, kind, path, force):
                self.note("refused", f"{where}: {qual} -> {new}: {reason}")
                continue
            if ident in self.rename and self.rename[ident] != new:
                self.note("listed twice", f"{where}: {qual} -> {new}, before {self.rename[ident]}")
                continue
            if new in BUILTINS:
                self.note("shadows builtin", f"{where}: {qual} -> {new}")
            self.rename[ident] = new
            self.why[ident] = where

    def _near(self, path, qual):
        last = qual.split(":")[-1].split(".")[-1]
        ids = [i for i in (*self.globals.get(last, ()), *self.attrs.get(last, ())) if i.startswith(self.mod[path] + ":")]
        return f"  (there is {', '.join(sorted(ids)[:3])})" if ids else ""

    def entry(self, path, qual):
        m = self.mod[path]
        qual, _, param = qual.partition(":")
        if param:
            ident = f"{m}:{qual}"
            if ident in self.functions and param in self.functions[ident][2].bound:
                return ("param", f"{ident}:{param}")
            if ident in self.class_scope:
                init = f"{ident}.__init__"
                if init in self.functions and param in self.functions[init][2].bound:
                    return ("param", f"{init}:{param}")
                if found := self.lookup_attr(ident, param):
                    return ("attr", found)
            # Class.method:param that is inherited
            cls, _, meth = qual.rpartition(".")
            if cls and f"{m}:{cls}" in self.class_scope and (found := self.lookup_attr(f"{m}:{cls}", meth)):
                if found in self.functions and param in self.functions[found][2].bound:
                    return ("param", f"{found}:{param}")
            return None
        if "(" in qual:
            head, _, rest = qual.partition("(")
            return self.entry(path, f"{head}:{rest.rstrip(')')}")
        parts = qual.split(".")
        if len(parts) == 1:
            infos = self.file[path].module.bound.get(qual)
            if infos and any(not (i and i[0] == "import") for i in infos):
                return ("global", f"{m}:{qual}")
            return None
        ident = f"{m}:{'.'.join(parts[:-1])}"
        if ident in self.class_scope:
            if parts[-1] in self.names[ident]:
                return ("attr", f"{ident}.{parts[-1]}")
            if found := self.lookup_attr(ident, parts[-1]):
                return ("attr", found)
            return None
        full = f"{m}:{'.'.join(parts[:-1])}.<locals>.{parts[-1]}"
        if full in self.functions or full in self.class_scope:
            return ("local", full)
        if ident in self.functions:
            scope = self.functions[ident][2]
            if parts[-1] in scope.bound:
                is_param = any(i and i[0] == "param" for i in scope.bound[parts[-1]])
                return ("param", f"{ident}:{parts[-1]}") if is_param else ("local", full)
        infos = self.file[path].module.bound.get(parts[0])
        if infos and len(parts) == 2 and "dtype" in self._assigned(path, parts[0]):
            return ("dtype", f"{m}:{parts[0]}.{parts[1]}")
        return None

    def _assigned(self, path, name):
        for node in self.file[path].tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                return ast.get_source_segment(self.texts[path], node.value) or ""
        return ""

    def wire_classes(self):
        if hasattr(self, "_wire"):
            return self._wire
        wire = {}
        for f, data in self.oracle["files"].items():
            if f.split("/")[0] not in TOPS:
                continue
            for name, pos, classes in data["serialised"]:
                if name in ("fields", "vars", "dumps"):
                    continue
                for c in classes:
                    if c in self.cid:
                        wire.setdefault(self.cid[c], f"{name} in {f}:{pos[0]}")
        for ident, kinds in self.kinds.items():
            if "pydantic" in kinds:
                wire[ident] = "a pydantic model"
            elif "struct" in kinds:
                wire[ident] = "a msgspec.Struct"
            elif "typeddict" in kinds:
                wire[ident] = "a TypedDict"
        todo = list(wire)
        while todo:
            ident = todo.pop()
            if ident not in self.class_scope:
                continue
            f, node, scope = self.class_scope[ident]
            for sub in ast.walk(node):
                if isinstance(sub, ast.AnnAssign) and "ClassVar" not in ast.unparse(sub.annotation):
                    for name in ast.walk(sub.annotation):
                        if isinstance(name, (ast.Name, ast.Attribute)):
                            got = self.resolve_expr(f, name, scope)
                            if got and got[0] == "id" and got[1] in self.class_scope and got[1] not in wire:
                                if "dataclass" in self.kinds[got[1]] or "namedtuple" in self.kinds[got[1]]:
                                    wire[got[1]] = f"part of {ident}"
                                    todo.append(got[1])
            for base in self.mro.get(ident, [])[1:]:
                if base in self.class_scope and base not in wire:
                    wire[base] = f"base of {ident}"
                    todo.append(base)
        self._wire = wire
        return wire

    def refuse(self, ident, kind, path, force):
        if kind == "attr":
            cls, _, attr = ident.rpartition(".")
            for base in self.mro.get(cls, [])[1:]:
                if base not in self.names and attr in self.external.get(base, ()):
                    return f"overrides {base}.{attr}"
            if attr.startswith("__") and attr.endswith("__"):
                return "dunder"
            _, node, scope = self.class_scope[cls]
            is_field = any(
                isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == attr for n in node.body
            )
            if is_field and cls in self.wire_classes():
                if not force and not (cls.startswith("cleave_worker.") and "struct" in self.kinds[cls]):
                    return f"wire key: {cls} is {self.wire_classes()[cls]} (4th column 'force' renames it)"
                self.note("wire key renamed", f"{ident}")
        if kind == "global" and ident in self.functions or kind == "param":
            f = ident.rsplit(":", 1)[0] if kind == "param" else ident
            if f in self.functions:
                node = self.functions[f][1]
                text = " ".join(ast.unparse(d) for d in node.decorator_list)
                if "fixture" in text or ".command" in text or ".callback" in text or "kopf." in text or "field_validator" in text:
                    if kind == "param":
                        p = ident.rsplit(":", 1)[1]
                        for a in [*node.args.args, *node.args.kwonlyargs]:
                            if a.arg == p and a.annotation and '"--' in ast.unparse(a.annotation).replace("'", '"'):
                                return None
                    if not force:
                        return f"named by a framework: @{text}"
                if kind == "param":
                    p = ident.rsplit(":", 1)[1]
                    for a in [*node.args.args, *node.args.kwonlyargs]:
                        if a.arg == p and a.annotation is not None:
                            t = ast.unparse(a.annotation)
                            if "typer." in t and "'--" not in t and not force:
                                return f"a flag of the command line: {t[:60]}"
        return None

    # ---- groups
    def propagate(self):
        """Overrides and implementations take the name of what they override."""
        subs = defaultdict(set)
        for c, mro in self.mro.items():
            for b in mro[1:]:
                subs[b].add(c)

        def relatives(ident):
            cls, _, attr = ident.rpartition(".")
            seen, todo = {cls}, [cls]
            while todo:
                c = todo.pop()
                for d in [*self.mro.get(c, [])[1:], *subs.get(c, ())]:
                    if d in self.names and attr in self.names[d] and d not in seen:
                        seen.add(d)
                        todo.append(d)
            return {f"{c}.{attr}" for c in seen}

        protos = []
        for proto, cls, need, exact in self.oracle["implements"]:
            p, c = self.cid.get(proto), self.cid.get(cls)
            if p and c and exact:
                protos.append((p, c, [n for n in need if not n.startswith("__")]))
        todo = [i for i in self.rename if self._is_attr(i)]
        while todo:
            ident = todo.pop()
            new = self.rename[ident]
            cls, _, attr = ident.rpartition(".")
            for other in relatives(ident):
                if other == ident:
                    continue
                if other in self.rename:
                    if self.rename[other] != new:
                        self.note("names of one method differ", f"{ident} -> {new}, {other} -> {self.rename[other]}")
                    continue
                o_cls = other.rpartition(".")[0]
                if any(b not in self.names and attr in self.external.get(b, ()) for b in self.mro.get(o_cls, [])):
                    self.note("overrides foreign", f"{other} (relative of {ident})")
                    continue
                self.note("also renamed (override)", f"{other} -> {new} with {ident}")
                self.rename[other] = new
                self.why[other] = self.why[ident]
                todo.append(other)
            for p, c, need in protos:
                if attr not in need:
                    continue
                p_id, c_id = self.lookup_attr(p, attr), self.lookup_attr(c, attr)
                if not p_id or not c_id or p_id == c_id:
                    continue
                if p_id == ident:
                    other = c_id
                elif c_id == ident:
                    other = p_id
                else:
                    continue
                if other in self.rename:
                    if self.rename[other] != new:
                        self.note("protocol and class differ", f"{p_id} -> {self.rename[p_id]}, {c_id} -> {self.rename[c_id]}")
                    continue
                in_tests = not other.startswith(("cleave.", "cleave_worker."))
                if in_tests:
                    package = p.split(":")[0].split(".")[:2]
                    near = self.near_modules(self.class_scope[c][0])
                    if not any(n.split(".")[:2] == package for n in near):
                        self.note("protocol? (test)", f"{ident} -> {new}: {other} left")
                        continue
                if len(need) > 1 or in_tests:
                    self.note("also renamed (protocol)", f"{other} -> {new} with {ident}")
                    self.rename[other] = new
                    self.why[other] = self.why[ident]
                    todo.append(other)
                else:
                    self.note("protocol?", f"{ident} -> {new}: {other} is not listed and may belong together")
        # parameters
        for ident in [i for i in self.rename if self._is_param(i)]:
            func, _, param = ident.rpartition(":")
            if not self._is_attr(func):
                continue
            group = relatives(func)
            for p, c, need in protos:
                attr = func.rpartition(".")[2]
                p_id, c_id = self.lookup_attr(p, attr), self.lookup_attr(c, attr)
                if attr in need and p_id and c_id and (p_id in group or c_id in group):
                    group |= {p_id, c_id}
            for other in group:
                key = f"{other}:{param}"
                if other in self.functions and param in self.functions[other][2].bound and key not in self.rename:
                    self.rename[key] = self.rename[ident]
                    self.why[key] = self.why[ident]
                    self.note("also renamed (override)", f"{key} -> {self.rename[ident]}")

    def _is_param(self, ident):
        return ident.count(":") == 2

    def _is_attr(self, ident):
        return ident.count(":") == 1 and ident.rpartition(".")[0] in self.class_scope and "<locals>" not in ident.rpartition(".")[2]

    # ---- collisions in classes
    def class_collisions(self):
        subs = defaultdict(set)
        for c, mro in self.mro.items():
            for b in mro[1:]:
                subs[b].add(c)
        for ident, new in list(self.rename.items()):
            if not self._is_attr(ident) or ident not in self.rename:
                continue
            cls, _, attr = ident.rpartition(".")
            for c in {cls, *self.mro.get(cls, []), *subs.get(cls, ())}:
                if c in self.names:
                    for n in self.names[c]:
                        other = f"{c}.{n}"
                        if n == new and self.rename.get(other, n) == new:
                            self.drop(ident, f"{other} exists")
                        elif n != attr and self.rename.get(other) == new:
                            self.drop(ident, f"{other} gets the same name")
                elif new in self.external.get(c, ()) and c != "builtins.object":
                    self.drop(ident, f"{c} has {new}")

    def drop(self, ident, why):
        if ident not in self.rename:
            return
        new = self.rename[ident]
        attr = ident.split(":")[-1].split(".")[-1]
        # the whole group goes
        group = [i for i in self.rename if self.why[i] == self.why[ident] and i.split(":")[-1].split(".")[-1] == attr]
        for i in group:
            del self.rename[i]
            self.dropped[i] = new
        self.note("collision, not renamed", f"{self.why.get(ident)}: {ident} -> {new}: {why}")

    # ---- one file
    def uniform(self, name, pools):
        """The one new name of everything of this name, or None; and whether some of it is renamed."""
        ids = set()
        for pool in pools:
            ids |= pool.get(name, set())
        if not ids:
            return None, False
        news = {self.rename.get(i) for i in ids}
        if len(news) == 1:
            return next(iter(news)), None not in news
        return None, any(news)

    def edit_file(self, path):
        file, text = self.file[path], self.texts[path]
        edits = Edits(text)
        used = {}  # start -> id
        data = self.oracle["files"].get(path, {"members": {}, "calls": {}, "first": {}})
        line_of = file.line_of

        def put(start, old, ident, new):
            edits.add(start, start + len(old), new)
            used[start] = ident

        moved_pos = {}
        for n in ast.walk(file.tree):
            if isinstance(n, ast.FormattedValue):
                moved_pos[id(n.value)] = (n.lineno, n.col_offset)

        def lookup(table, node):
            pos = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            if pos in table or id(node) not in moved_pos:
                return table.get(pos)
            return table.get((*moved_pos[id(node)], node.end_lineno, node.end_col_offset))

        # names
        for o in file.occurrences:
            if o.target is None:
                continue
            if o.kind == "import":
                entry = o.node
                got = self.resolve_import(path, entry)
                if got and got[0] == "id" and (new := self.rename.get(got[1])):
                    put(entry.start, entry.alias.name, got[1], new)
                    if entry.alias.asname == entry.alias.name:
                        put(o.start, o.name, got[1], new)
                continue
            got = self.binding(path, o.target, o.name)
            if not got or got[0] != "id":
                continue
            new = self.rename.get(got[1])
            if not new:
                continue
            infos = o.target.bound.get(o.name) or []
            imports = [i[1] for i in infos if i and i[0] == "import"]
            if imports and imports[0].alias.asname and imports[0].alias.asname != imports[0].alias.name:
                continue
            put(o.start, o.name, got[1], new)
        # attributes
        for node, at, scope in file.attributes:
            name = node.attr
            ids = set()
            base = self.resolve_expr(path, node.value, scope)
            known = False
            if base and base[0] == "module":
                got = self.member_of_module(base[1], name)
                known = True
                if got and got[0] == "id":
                    ids.add(got[1])
            elif base and base[1] in self.class_scope:
                known = True
                if got := self.lookup_attr(base[1], name):
                    ids.add(got)
            if not known:
                found = lookup(data["members"], node)
                if found == []:
                    known = True
                if found:
                    for kind, full in found:
                        if kind == "class":
                            known = True
                            if full in self.cid:
                                ids.add(f"{self.cid[full]}.{name}")
                        elif kind == "module":
                            known = True
                            got = None
                            if full not in self.path_of:
                                continue
                            got = self.member_of_module(self.path_of[full], name)
                            if got and got[0] == "id":
                                ids.add(got[1])
            if known:
                news = {self.rename.get(i) for i in ids}
                if len(news) > 1:
                    self.note("ambiguous", f"{path}:{node.end_lineno}: .{name}: {sorted((i, self.rename.get(i)) for i in ids)}")
                    news.discard(None)
                if ids and (new := next(iter(sorted(n for n in news if n)), None)):
                    put(at, name, next(i for i in ids if self.rename.get(i) == new), new)
                continue
            if not known and base is None and isinstance(node.value, ast.Name):
                target = file.lookup(scope, node.value.id)
                infos = (target.bound.get(node.value.id) if target else None) or []
                if infos and all(i and i[0] == "import" for i in infos):
                    continue
            if self.dtypes and self.in_numba(path) and (new := self.record_field(path, node.value, scope, name)):
                if new != name:
                    put(at, name, f"dtype.{name}", new)
                continue
            self.guess(path, line_of(at), at, name, [self.attrs], put, f".{name}")
        # calls
        for node, scope in file.calls:
            callees = lookup(data["calls"], node) or []
            first = lookup(data["first"], node)
            fname = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if any(k.arg for k in node.keywords):
                self.keywords(path, node, scope, callees, first, fname, put)
            if fname in ("setattr", "getattr", "hasattr", "delattr", "object", "delitem", "__setattr__") and len(node.args) > 1:
                arg = node.args[1]
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    self.by_string(path, node.args[0], arg, scope, first, put)
            if fname == "attrgetter":
                for arg in node.args:
                    if isinstance(arg, ast.Constant):
                        at = file.start(arg) + 1
                        for part in arg.value.split("."):
                            self.guess(path, node.lineno, at, part, [self.attrs], put, f'attrgetter "{part}"')
                            at += len(part) + 1
        # class patterns
        for node, scope in file.matches:
            got = self.resolve_expr(path, node.cls, scope)
            for name, pattern in zip(node.kwd_attrs, node.kwd_patterns):
                if got and got[0] == "id" and got[1] in self.class_scope:
                    ident = self.lookup_attr(got[1], name)
                    if new := self.rename.get(ident):
                        before = text[: file.start(pattern)]
                        m = re.search(rf"({name})\s*=\s*$", before)
                        if m:
                            put(m.start(1), name, ident, new)
        # TypeVar("X"), __all__
        for node in file.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name == "__all__":
                    for c in ast.walk(node.value):
                        if isinstance(c, ast.Constant) and isinstance(c.value, str):
                            got = self.member_of_module(path, c.value)
                            if got and got[0] == "id" and (new := self.rename.get(got[1])):
                                put(file.start(c) + 1, c.value, got[1], new)
                value = node.value
                if isinstance(value, ast.Call) and value.args and isinstance(value.args[0], ast.Constant):
                    if value.args[0].value == name and (new := self.rename.get(f"{self.mod[path]}:{name}")):
                        put(file.start(value.args[0]) + 1, name, f"{self.mod[path]}:{name}", new)
        # __slots__, __match_args__
        for node, scope in file.classes:
            cls = f"{self.mod[path]}:{scope.qual}"
            for stmt in node.body:
                if isinstance(stmt, ast.Assign) and getattr(stmt.targets[0], "id", "") in ("__slots__", "__match_args__"):
                    for c in ast.walk(stmt.value):
                        if isinstance(c, ast.Constant) and isinstance(c.value, str):
                            ident = self.lookup_attr(cls, c.value)
                            if new := self.rename.get(ident):
                                put(file.start(c) + 1, c.value, ident, new)
        # dotted strings, other strings
        subscripts = {
            id(n.slice): n.value for n in ast.walk(file.tree) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)
        }
        docstrings = self.docstrings(file)
        for node, scope in file.strings:
            if id(node) in docstrings:
                continue
            value = node.value
            if self.dtypes and self.in_numba(path):
                owner = subscripts.get(id(node))
                new = None
                if owner is not None:
                    new = self.record_field(path, owner, scope, value)
                elif value in self.dtype_names and (
                    value not in self.fields
                    or (path.startswith("operator/cleave/simulator/") and not self.in_dtype(path, node))
                ):
                    new = self.dtype_names[value]
                if new and new != value:
                    put(file.start(node) + 1, value, f"dtype.{value}", new)
                    self.note("record string", f"{path}:{node.lineno}: {value} -> {new}")
                    continue
                if new is None and self.dtype_names.get(value) and "/simulator/" in path:
                    self.note("record string left?", f"{path}:{node.lineno}: {value}")
            if re.fullmatch(r"cleave(_worker)?(\.\w+)+", value):
                self.dotted(path, file.start(node) + 1, value, put)
            elif WORD.match(value) and path.startswith(tuple(TOPS)) and ("_" in value or not value.islower()):
                new, some = self.uniform(value, [self.attrs, self.globals])
                if some and not any(s <= file.start(node) + 1 < e for s, e in edits.all):
                    own = [i for i in self.attrs.get(value, set()) | self.globals.get(value, set()) if i in self.rename]
                    if any(i.split(".")[:2] == self.mod[path].split(".")[:2] for i in own):
                        self.note("string?", f'{path}:{node.lineno}: "{value}" ({own[0]} -> {self.rename[own[0]]})')
        if self.dtypes and path.startswith(("operator/cleave/simulator", "operator/cleave/policy")):
            self.dtype_strings(path, file, edits, put)
        self.prose(path, file, edits, docstrings, used)
        return edits, used

    def guess(self, path, line, at, name, pools, put, shown):
        new, some = self.uniform(name, pools)
        if path.split("/")[0] in TOPS:
            if some:
                self.note("any in the sources", f"{path}:{line}: {shown} left ({new})")
            return
        if new and name not in self.ext_names:
            ids = set().union(*(p.get(name, set()) for p in pools))
            self.note("guessed", f"{path}:{line}: {shown} -> {new}")
            put(at, name, sorted(ids)[0], new)
        elif some:
            ids = set().union(*(p.get(name, set()) for p in pools))
            options = sorted({self.rename[i] for i in ids if i in self.rename})
            better = self.by_neighbourhood(path, ids)
            if better and path.split("/")[0] not in TOPS:
                self.note("guessed by imports", f"{path}:{line}: {shown} -> {better[1]}")
                put(at, name, better[0], better[1])
            else:
                self.note("unresolved", f"{path}:{line}: {shown} (perhaps {', '.join(options)})")

    def by_neighbourhood(self, path, ids):
        """Of several definitions those in modules that the file (or its conftest) imports."""
        near = self.near_modules(path)
        mine = [i for i in ids if i.split(":")[0] in near or i.startswith(self.mod[path] + ":")]
        if not mine:
            return None
        news = {self.rename.get(i) for i in mine}
        if len(news) == 1 and None not in news:
            return mine[0], next(iter(news))
        return None

    def near_modules(self, path):
        if not hasattr(self, "_near_modules"):
            self._near_modules = {}
        if path not in self._near_modules:
            found = set()
            paths = [path]
            folder = Path(path).parent
            while str(folder) != ".":
                conftest = str(folder / "conftest.py")
                if conftest in self.file:
                    paths.append(conftest)
                folder = folder.parent
            for p in paths[:2]:
                for e in self.file[p].imports:
                    got = self.resolve_import(p, e)
                    if got:
                        found.add(self.mod[got[1]] if got[0] == "module" else got[1].split(":")[0])
            self._near_modules[path] = found
        return self._near_modules[path]

    def keywords(self, path, node, scope, callees, first, fname, put):
        file = self.file[path]
        targets = []
        if fname == "partial" and node.args:
            got = self.resolve_expr(path, node.args[0], scope)
            if got and got[0] == "id":
                callees = [("id", got[1])]
        got = self.resolve_expr(path, node.func, scope)
        if got and got[0] == "id" and (got[1] in self.class_scope or got[1] in self.functions):
            callees = [("id", got[1])]
        is_replace = fname in ("replace", "_replace") and not any(
            k == "def" and (n.split(".")[0] in TOPS.values() or n.startswith("x__")) for k, n in callees
        )
        if fname == "replace" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, (ast.Name,)):
            if node.func.value.id not in ("dataclasses", "copy", "structs", "msgspec") and callees:
                is_replace = is_replace and False
        for keyword in node.keywords:
            if not keyword.arg:
                continue
            name = keyword.arg
            at = file.start(keyword)
            ids, known = set(), False
            if is_replace:
                classes = first or []
                if fname == "_replace" and isinstance(node.func, ast.Attribute):
                    pos = (node.func.lineno, node.func.col_offset, node.func.end_lineno, node.func.end_col_offset)
                    members = self.oracle["files"].get(path, {}).get("members", {}).get(pos) or []
                    classes = [c for k, c in members if k == "class"]
                for c in classes:
                    if c in self.cid:
                        known = True
                        if found := self.lookup_attr(self.cid[c], name):
                            ids.add(found)
            for kind, full in callees:
                if is_replace:
                    break
                ident = full if kind == "id" else self.cid.get(full) if kind == "class" else self.fullname_id(full)
                if ident is None:
                    known = known or kind == "class" or (kind == "def" and full.split(".")[0] not in ("Any",))
                    continue
                if ident in self.class_scope:
                    init = self.init.get(ident)
                    if init and not init[1] and init[0] in self.class_scope:
                        f = f"{init[0]}.__init__"
                        if f in self.functions:
                            if name in self.functions[f][2].bound:
                                ids.add(f"{f}:{name}")
                                known = True
                            continue
                    known = True
                    if found := self.lookup_attr(ident, name):
                        ids.add(found)
                elif ident in self.functions:
                    a = self.functions[ident][1].args
                    if any(x.arg == name for x in [*a.posonlyargs, *a.args, *a.kwonlyargs]):
                        known = True
                        ids.add(f"{ident}:{name}")
                    elif not a.kwarg:
                        known = True
            if known:
                news = {self.rename.get(i) for i in ids} - {None}
                if news:
                    new = sorted(news)[0]
                    if len(news) > 1:
                        self.note("ambiguous", f"{path}:{keyword.lineno}: {name}=: {sorted(ids)}")
                    put(at, name, next(i for i in ids if self.rename.get(i) == new), new)
            else:
                fields = {name: {i for i in self.attrs.get(name, set())}}
                self.guess(path, keyword.lineno, at, name, [fields, self.params], put, f"{name}=")

    def by_string(self, path, target, arg, scope, first, put):
        got = self.resolve_expr(path, target, scope)
        ident = None
        if got and got[0] == "module":
            member = self.member_of_module(got[1], arg.value)
            ident = member[1] if member and member[0] == "id" else None
        elif got and got[1] in self.class_scope:
            ident = self.lookup_attr(got[1], arg.value)
        elif first:
            for c in first:
                if c in self.cid and (found := self.lookup_attr(self.cid[c], arg.value)):
                    ident = found
        else:
            self.guess(path, arg.lineno, self.file[path].start(arg) + 1, arg.value, [self.attrs, self.globals], put, f'"{arg.value}"')
            return
        if new := self.rename.get(ident):
            put(self.file[path].start(arg) + 1, arg.value, ident, new)

    def dotted_ids(self, text):
        """For `cleave.a.b.Name.attr`: (offset, word, id) of the words behind the module."""
        parts = text.split(".")
        for n in range(len(parts), 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self.path_of:
                at = len(prefix) + 1
                got = ("module", self.path_of[prefix])
                out = []
                for word in parts[n:]:
                    if got and got[0] == "module":
                        got = self.member_of_module(got[1], word)
                    elif got and got[1] in self.class_scope:
                        found = self.lookup_attr(got[1], word)
                        got = ("id", found) if found else None
                    else:
                        got = None
                    if got and got[0] == "id":
                        out.append((at, word, got[1]))
                    at += len(word) + 1
                return out
        return []

    def dotted(self, path, start, text, put):
        for at, word, ident in self.dotted_ids(text):
            if new := self.rename.get(ident):
                put(start + at, word, ident, new)

    # ---- numba's records
    RECORDS = {"state": "STATE", "request": "REQUEST", "inst": "INSTANCE", "instance": "INSTANCE", "slot": "SLOT",
               "member": "MEMBER", "members": "MEMBER", "watch": "WATCH", "history": "WATCH", "queue": "QUEUE", "pull": "PULL"}

    def in_dtype(self, path, node):
        """Whether a string stands in the definition of a record: `dtype_strings` renames those."""
        if not hasattr(self, "_dtype_lines"):
            self._dtype_lines = {}
        if path not in self._dtype_lines:
            self._dtype_lines[path] = [
                (s.lineno, s.end_lineno)
                for s in self.file[path].tree.body
                if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call)
                and getattr(s.value.func, "id", getattr(s.value.func, "attr", "")) in ("_dtype", "dtype")
            ]
        return any(a <= node.lineno <= b for a, b in self._dtype_lines[path])

    def record_field(self, path, node, scope, name):
        """The new name of a field of a numpy record, `name` itself if it stays, None: no record."""
        if name not in self.fields:
            return None
        const = None
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call):
            f = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if f.endswith("_at"):
                const = f[:-3].upper()
        elif isinstance(node, ast.Attribute):
            const = self.RECORDS.get(node.attr) or self.RECORDS.get(node.attr.rstrip("s"))
        elif isinstance(node, ast.Name):
            s = self.file[path].lookup(scope, node.id)
            for info in (s.bound.get(node.id) or []) if s else []:
                if info and info[0] == "store":
                    for stmt in ast.walk(s.node):
                        if isinstance(stmt, ast.Assign) and any(t is info[1] for t in stmt.targets):
                            v = stmt.value
                            f = getattr(getattr(v, "func", None), "id", "") if isinstance(v, ast.Call) else ""
                            if f.endswith("_at"):
                                const = f[:-3].upper()
            if const is None:
                const = self.RECORDS.get(node.id) or (self.RECORDS.get(node.id.rstrip("s")))
        owners = {i for i in self.fields[name] if const and i.split(":")[1].startswith(f"{const}.")}
        if owners:
            return self.dtypes.get(next(iter(owners)), name)
        if const in self.constants:
            return None
        if len(self.fields[name]) and name in self.dtype_names and self.dtype_names[name]:
            if "/simulator/" in path and path.startswith("operator/") or isinstance(const, type(None)) and "role_flip" in path:
                self.note("record guessed", f"{path}:{node.lineno}: {ast.unparse(node)[:40]}.{name} -> {self.dtype_names[name]}")
                return self.dtype_names[name]
        return None

    def in_numba(self, path):
        if "role_flip" in path or "pool_manager" in path:
            return True
        if "reference_simulator" in path:
            return True
        return "/simulator/" in path or "policy/" in path or "tests/simulator" in path or "tests/policy" in path

    def dtype_strings(self, path, file, edits, put):
        m = self.mod[path]
        for node in file.tree.body:
            if not isinstance(node, ast.Assign):
                continue
            name = getattr(node.targets[0], "id", "")
            mine = {i.split(".")[-1]: n for i, n in self.dtypes.items() if i.startswith(f"{m}:{name}.")}
            if not mine:
                continue
            begin, end = file.start(node.value), file.end(node.value)
            for old, new in mine.items():
                hits = [h for h in re.finditer(rf"\b{old}\b", edits.text[begin:end])]
                for h in hits:
                    s = begin + h.start()
                    if not edits.overlaps(s, s + len(old)):
                        put(s, old, f"dtype.{old}", new)

    def finish_dtypes(self):
        self.dtype_names = {}
        self.fields = fields = defaultdict(set)
        self.constants = set()
        if not self.dtypes:
            return
        for f in self.sources:
            if f.startswith(("operator/cleave/simulator", "operator/cleave/policy")):
                for node in self.file[f].tree.body:
                    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                        if getattr(node.value.func, "id", getattr(node.value.func, "attr", "")) in ("_dtype", "dtype"):
                            const = getattr(node.targets[0], "id", "")
                            self.constants.add(const)
                            for c in ast.walk(node.value):
                                if isinstance(c, ast.Constant) and isinstance(c.value, str):
                                    for w in c.value.split():
                                        fields[w].add(f"{self.mod[f]}:{const}.{w}")
        for i, n in self.dtypes.items():
            w = i.split(".")[-1]
            if w not in fields:
                is_prefix = w.endswith("_")
                self.note("record field unknown", f"{i} -> {n}" + ": taken as a prefix in strings" * is_prefix)
                if is_prefix:
                    self.dtype_names[w] = n
        for w, ids in fields.items():
            news = {self.dtypes.get(i) for i in ids}
            if news == {None}:
                continue
            if len(news) == 1:
                self.dtype_names[w] = news.pop()
            else:
                self.note("dtype differs", f"{w}: {sorted((i, self.dtypes.get(i)) for i in ids)}")

    # ---- prose
    def docstrings(self, file):
        found = {}
        for node in ast.walk(file.tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                for stmt in body:
                    if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str):
                        found[id(stmt.value)] = stmt.value
        return found

    def innermost(self, file, line):
        best = file.module
        for scope in file.scopes:
            n = scope.node
            if scope.kind in ("class", "function") and hasattr(n, "body") and isinstance(n.body, list):
                first = min([n.lineno, *[d.lineno for d in n.decorator_list]])
                if first <= line <= n.end_lineno:
                    if best.kind == "module" or best.node.lineno <= n.lineno:
                        best = scope
        return best

    def prose(self, path, file, edits, docstrings, used):
        spans = [(file.start(n), file.end(n), n.lineno) for n in docstrings.values()]
        try:
            for t in tokenize.generate_tokens(io.StringIO(edits.text).readline):
                if t.type == tokenize.COMMENT:
                    s = file._lines[t.start[0] - 1] + t.start[1]
                    spans.append((s, s + len(t.string), t.start[0]))
        except tokenize.TokenError:
            pass
        for start, end, line in spans:
            chunk = edits.text[start:end]
            scope = None
            covered = []
            for m in re.finditer(r"(?<!`)`([^`\n]+)`", chunk):
                covered.append(m.span())
                if scope is None:
                    scope = self.innermost(file, line)
                self.code_words(path, file, scope, m.group(1), start + m.start(1), edits, used)
            for m in re.finditer(r"(?<![\w.`/\-])(_?[A-Za-z]\w+)(?![\w`/\-]|\.\w)", chunk):
                word = m.group(1)
                if any(a <= m.start() < b for a, b in covered):
                    continue
                humps = re.findall(r"[A-Z][a-z0-9]+", word)
                snake = "_" in word.strip("_") and not word.isupper()
                if not (snake or (len(humps) > 1 and "_" not in word and word[0].isupper())):
                    continue
                new, some = self.uniform(word, [self.attrs, self.globals])
                s = start + m.start(1)
                if new and not edits.overlaps(s, s + len(word)):
                    edits.add(s, s + len(word), new)

    def code_words(self, path, file, scope, code, start, edits, used):
        for m in re.finditer(r"(?<![\w/\"'$-])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?![\w/\"'-])", code):
            words = m.group(1)
            whole = code.strip("()*[] ") == words or code.rstrip("()") == words
            for at, word, ident in self.prose_ids(path, file, scope, words, whole):
                new = self.rename.get(ident) if not ident.startswith("new=") else ident[4:]
                s = start + m.start(1) + at
                if new and new != word and not edits.overlaps(s, s + len(word)):
                    edits.add(s, s + len(word), new)

    def prose_ids(self, path, file, scope, words, whole):
        parts = words.split(".")
        got = None
        first = parts[0]
        if file is not None:
            s = scope
            while s is not None and got is None:
                if s.kind == "class":
                    cls = f"{self.mod[path]}:{s.qual}"
                    if found := self.lookup_attr(cls, first):
                        got = ("id", found)
                if got is None and first in s.bound:
                    got = self.binding(path, s, first) or ("foreign", "")
                s = s.parent
            if got is None and scope.kind == "module" and whole:
                # Behind a class or function comes its own comment: none is looked up here.
                pass
        if got is None and words.startswith(("cleave.", "cleave_worker.")):
            return self.dotted_ids(words)
        if got is None and len(parts) > 1:
            for n in range(len(parts) - 1, 0, -1):
                owners = self.suffix.get(".".join(parts[:n]), set())
                if len(owners) > 1 and path in self.mod:
                    pkg = self.mod[path].rpartition(".")[0]
                    owners = {o for o in owners if o.rpartition(".")[0] == pkg} or owners
                if len(owners) == 1:
                    full = next(iter(owners))
                    offset = len(full) - len(".".join(parts[:n]))
                    return [(a - offset, w, i) for a, w, i in self.dotted_ids(full + "." + ".".join(parts[n:]))]
            owners = self.uniq_class.get(first, set())
            if len(owners) == 1:
                got = ("id", next(iter(owners)))
        if got is None:
            if len(parts) == 1 and ("_" in first.strip("_") or first.startswith("_") or (first != first.lower() and not first.isupper())):
                new, _ = self.uniform(first, [self.attrs, self.globals])
                if new:
                    return [(0, first, f"new={new}")]
                if file is not None and path in self.mod:
                    pkg = self.mod[path].rpartition(".")[0]
                    ids = [i for i in self.globals.get(first, ()) if i.split(":")[0].rpartition(".")[0] == pkg]
                    if len(ids) == 1:
                        return [(0, first, ids[0])]
            return []
        out = []
        at = 0
        for i, word in enumerate(parts):
            if i:
                if got and got[0] == "module":
                    got = self.member_of_module(got[1], word)
                elif got and got[0] == "id" and got[1] in self.class_scope:
                    found = self.lookup_attr(got[1], word)
                    got = ("id", found) if found else None
                else:
                    new, _ = self.uniform(word, [self.attrs])
                    if new and ("_" in word):
                        out.append((at, word, f"new={new}"))
                    got = None
            if got and got[0] == "id":
                out.append((at, word, got[1]))
            at += len(word) + 1
        return out

    def edit_text(self, f, text):
        """Documents and settings: backticks, and dotted names."""
        edits = Edits(text)
        for m in re.finditer(r"(?<![\w./-])cleave(?:_worker)?(?:\.\w+)+(?::\w+)?", text):
            words = m.group().replace(":", ".")
            for at, word, ident in self.dotted_ids(words):
                if new := self.rename.get(ident):
                    edits.add(m.start() + at, m.start() + at + len(word), new)
        if f.endswith(".md"):
            for m in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text):
                code = m.group(1)
                if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", code):
                    words = code.removesuffix("()")
                    if words.islower() and "_" not in words and "." not in words:
                        continue
                    near = self.paths_near(text, m.start())
                    for at, word, ident in self.doc_ids(words, near):
                        new = self.rename.get(ident) if not ident.startswith("new=") else ident[4:]
                        s = m.start(1) + at
                        if new and new != word and not edits.overlaps(s, s + len(word)):
                            edits.add(s, s + len(word), new)
        return edits

    def paths_near(self, text, at):
        line = text[text.rfind("\n", 0, at) + 1 : (text.find("\n", at) + 1) or len(text)]
        return {p for p in re.findall(r"((?:operator|worker)/[\w./-]+\.py)", line) if p in self.file}

    def doc_ids(self, words, near):
        for p in near:
            if words.split(".")[0] in self.file[p].module.bound:
                return self.prose_ids(p, self.file[p], self.file[p].module, words, True)
        return self.prose_ids("", None, None, words, True)

    # ---- everything
    def apply(self):
        results, uses = {}, {}
        todo = set(self.sources)
        self.finish_dtypes()
        for turn in range(30):
            todo_now, todo = todo, set()
            drops = {}
            for f in self.sources:
                if f not in todo_now:
                    continue
                edits, used = self.edit_file(f)
                results[f], uses[f] = edits, used
                if not edits.all:
                    continue
                for ident, why in self.captured(f, edits, used):
                    drops.setdefault(ident, why)
            if not drops:
                break
            for ident, why in drops.items():
                before = set(self.rename)
                self.drop(ident, why)
                gone = before - set(self.rename)
                words = {g.split(":")[-1].split(".")[-1] for g in gone}
                for f in self.sources:
                    if any(w in self.texts[f] for w in words):
                        todo.add(f)
        return results

    def captured(self, path, edits, used):
        """Renames that would change what a name means in this file."""
        old = self.file[path]
        text = edits.apply()
        try:
            new = File(text)
        except (SyntaxError, AssertionError) as error:
            self.note("broken", f"{path}: {error!r}")
            return []
        if len(old.occurrences) != len(new.occurrences):
            self.note("broken", f"{path}: other names than before")
            return []
        forward, back = {}, {}
        bad = []

        def ids_of(binding):
            if binding[0] is None:
                return None
            for o in old.by_binding.get(binding, ()):
                if o.start in used:
                    return used[o.start]
                if o.kind == "import" and o.node.start in used:
                    return used[o.node.start]
            return None

        for a, b in zip(old.occurrences, new.occurrences):
            x = (a.target.index if a.target else None, a.name)
            y = (b.target.index if b.target else None, b.name)
            where = f"{path}:{old.line_of(a.start)}"
            if forward.setdefault(x, y) != y or back.setdefault(y, x) != x:
                other = back.get(y, x)
                ids = [i for i in (ids_of(x), ids_of(other), ids_of((forward[x][0], a.name))) if i]
                if not ids:
                    # Who took the name? What is now called so in a nearer scope.
                    taker = [i for s, i in used.items() if self.rename.get(i) == b.name]
                    ids = taker[:1]
                kind = "builtin" if a.target is None else f"{a.target.kind} {a.target.qual or 'level'}"
                if ids:
                    bad.append((ids[0], f"{where}: '{b.name}' is taken there ({a.name} of {kind}, {other[1]})"))
                else:
                    self.note("capture?", f"{where}: {a.name} -> {b.name}")
        return bad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--moves", nargs="*", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/rename"))
    parser.add_argument("--no-format", action="store_true")
    options = parser.parse_args()
    start = time.time()
    project = Project(options.root)
    if options.oracle and options.oracle.exists():
        oracle = pickle.loads(options.oracle.read_bytes())
    else:
        import oracle as oracle_module

        oracle = oracle_module.run(project.root)
        if options.oracle:
            options.oracle.write_bytes(pickle.dumps(oracle))
    renamer = Renamer(project, oracle)
    print(f"indexed after {time.time() - start:.0f} s")
    from move import read_moves, test_moves

    moves, _ = read_moves(options.moves)
    moved = dict(moves)
    # only moves that were applied
    moved = {o: n for o, n in moved.items() if n in renamer.file and o not in renamer.file or n in renamer.file}
    for table in options.tables:
        renamer.load(table, moved)
    listed = len(renamer.rename)
    renamer.propagate()
    renamer.class_collisions()
    results = renamer.apply()
    options.out.mkdir(parents=True, exist_ok=True)
    changed = 0
    edits_count = 0
    for f, edits in results.items():
        if edits.all:
            changed += 1
            edits_count += len(edits.all)
            if not options.dry_run:
                (project.root / f).write_text(edits.apply())
    for f in project.files:
        if f.endswith(".py") or f.startswith("operator/cleave/rpc/v1/") or f.endswith(("uv.lock", ".png", ".svg")):
            continue
        try:
            text = (project.root / f).read_text()
        except UnicodeDecodeError:
            continue
        edits = renamer.edit_text(f, text)
        if edits.all:
            changed += 1
            edits_count += len(edits.all)
            if not options.dry_run:
                (project.root / f).write_text(edits.apply())
    if not options.dry_run and not options.no_format:
        ruff = str(project.root / ".venv" / "bin" / "ruff")
        subprocess.run([ruff, "check", "-q", "--select", "I,RUF022,RUF023", "--fix", "."], cwd=project.root)
        subprocess.run([ruff, "format", "-q", "."], cwd=project.root)
        from wrap import wrap

        wrap(project.root)
    (options.out / "report.txt").write_text("\n".join(sorted(renamer.notes)) + "\n")
    back = {n: o for o, n in moved.items()}

    def old_name(ident):
        m, _, rest = ident.partition(":")
        p = renamer.path_of.get(m)
        if p in back:
            m = Project.name_of(back[p])
        return f"{m}.{rest}"

    def new_name(ident):
        m, _, rest = ident.partition(":")
        out, walk = [], m + ":"
        parts = re.split(r"([.:])", rest)
        prefix = f"{m}:"
        for piece in parts:
            if piece in ".:":
                prefix += piece
                out.append(piece)
                continue
            prefix += piece
            out.append(renamer.rename.get(prefix, piece))
        return f"{m}.{''.join(out)}"

    rows = [f"{old_name(i)}\t{new_name(i)}" for i in sorted(renamer.rename) if not i.startswith("x__")]
    (options.out / "old-new.tsv").write_text("\n".join(rows) + "\n")
    counts = Counter(n.split("\t")[0] for n in renamer.notes)
    print(f"{listed} renames listed, {len(renamer.rename)} applied, {edits_count} edits in {changed} files, {time.time() - start:.0f} s")
    for kind, n in counts.most_common():
        print(f"  {n:5} {kind}")


if __name__ == "__main__":
    main()
