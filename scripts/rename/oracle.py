"""One run of mypy over everything: what each attribute and each call refers to.

oracle.py ROOT OUT.pickle
"""

import ast
import pickle
import re
import sys
import time
from pathlib import Path

from mypy import build, nodes, patterns, types as mt
from mypy.config_parser import parse_config_file
from mypy.modulefinder import BuildSource
from mypy.options import Options

from project import Project


def rewritten(project: Project, path: str) -> str:
    """The source with bare imports of helper modules replaced by their unique names; lines stay."""
    text = project.read(path)
    if path.split("/")[0] in ("operator", "worker"):
        return text
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found = project.resolve(path, node.module)
            if found and not found.startswith(("operator/", "worker/")):
                i = node.lineno - 1
                new = project.module[found]
                if found.endswith("__init__.py") and any(
                    project.resolve(path, f"{node.module}.{a.name}") for a in node.names
                ):
                    # from chaos import load: submodules
                    parts = []
                    for a in node.names:
                        sub = project.resolve(path, f"{node.module}.{a.name}")
                        parts.append(
                            f"import {project.module[sub]} as {a.asname or a.name}"
                            if sub
                            else f"from {new} import {a.name} as {a.asname or a.name}"
                        )
                    if node.lineno == node.end_lineno:
                        indent = re.match(r"\s*", lines[i]).group()
                        lines[i] = indent + "; ".join(parts) + "\n"
                        continue
                lines[i] = re.sub(rf"from {re.escape(node.module)} ", f"from {new} ", lines[i], count=1)
        elif isinstance(node, ast.Import):
            for a in node.names:
                found = project.resolve(path, a.name)
                if found and not found.startswith(("operator/", "worker/")):
                    i = node.lineno - 1
                    new = project.module[found]
                    lines[i] = re.sub(
                        rf"import {re.escape(a.name)}\b( as \w+)?", f"import {new} as {a.asname or a.name}", lines[i]
                    )
    return "".join(lines)


_CHILDREN = {}
_SKIP = {"node", "info", "type", "analyzed", "fullname", "unanalyzed_type", "definition", "metaclass_type", "mod_ref"}
_KINDS = None


def child_names(cls):
    names = _CHILDREN.get(cls)
    if names is None:
        found = []
        for base in cls.__mro__:
            for name, d in vars(base).items():
                if name.startswith("_") or name in _SKIP or name in found:
                    continue
                if type(d).__name__ in ("getset_descriptor", "member_descriptor"):
                    found.append(name)
        names = _CHILDREN[cls] = found
    return names


def walk(tree):
    """Every statement and expression of a file."""
    stack = [tree]
    seen = set()
    while stack:
        o = stack.pop()
        if id(o) in seen:
            continue
        seen.add(id(o))
        yield o
        if isinstance(o, nodes.MypyFile):
            stack += o.defs
            continue
        for name in child_names(type(o)):
            try:
                value = getattr(o, name)
            except AttributeError:
                continue
            todo = [value]
            while todo:
                v = todo.pop()
                if isinstance(v, (list, tuple)):
                    todo += v
                elif isinstance(v, (nodes.TypeInfo, nodes.MypyFile, nodes.Var)):
                    continue
                elif isinstance(v, (nodes.Expression, nodes.Statement, nodes.Argument, nodes.FuncItem, patterns.Pattern)):
                    stack.append(v)


_FIXTURES = {}


def annotated(project, path):
    text = rewritten(project, path)
    try:
        new = annotate(project, path, text)
        ast.parse(new)
        return new
    except SyntaxError as error:
        print("not annotated", path, error)
        return text
_BUILTIN_FIXTURES = {"monkeypatch": "pytest.MonkeyPatch", "tmp_path": None, "caplog": "pytest.LogCaptureFixture"}


INFERRED = {}  # (path, def line, param or "return" or "yield") -> text of a type
DOUBTED = set()


class Unknown(Exception):
    pass


def render(t, depth=0):
    t = mt.get_proper_type(t)
    if depth > 6:
        raise Unknown
    if isinstance(t, mt.AnyType):
        if depth == 0:
            raise Unknown
        return "typing.Any"
    if isinstance(t, mt.NoneType):
        return "None"
    if isinstance(t, mt.UnionType):
        return "typing.Union[" + ", ".join(render(i, depth + 1) for i in t.items) + "]"
    if isinstance(t, mt.LiteralType):
        return render(t.fallback, depth)
    if isinstance(t, mt.TupleType):
        f = t.partial_fallback.type.fullname
        if f != "builtins.tuple":
            return named(t.partial_fallback.type)
        return "tuple[" + (", ".join(render(i, depth + 1) for i in t.items) or "()") + "]"
    if isinstance(t, mt.TypeType):
        return f"type[{render(t.item, depth + 1)}]"
    if isinstance(t, mt.CallableType):
        if t.is_type_obj():
            return f"type[{render(t.ret_type, depth + 1)}]"
        return f"typing.Callable[..., {render(t.ret_type, depth + 1)}]"
    if isinstance(t, mt.Instance):
        name = named(t.type)
        if t.args and t.type.fullname != "builtins.type":
            name += "[" + ", ".join(render(a, depth + 1) for a in t.args) + "]"
        return name
    raise Unknown


def named(info):
    if "@" in info.fullname or "<" in info.fullname:
        raise Unknown
    return info.fullname.removeprefix("builtins.")


def infer(project, result):
    """Types of what tests leave unannotated, from one run, for the next; how many are new."""
    new = 0
    for f in project.sources:
        if f.split("/")[0] in ("operator", "worker", "scripts"):
            continue
        tree = result.files.get(project.module[f])
        if tree is None:
            continue
        by_pos = {}
        for o in walk(tree):
            if isinstance(o, nodes.Expression) and o in result.types:
                by_pos.setdefault((o.line, o.column, o.end_line, o.end_column), result.types[o])
        for node in ast.walk(ast.parse(project.read(f))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.returns is not None:
                continue
            texts = {"return": set(), "yield": set()}
            todo = list(node.body)
            while todo:
                n = todo.pop()
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                    continue
                value = None
                if isinstance(n, ast.Return) and n.value is not None:
                    value, kind = n.value, "return"
                elif isinstance(n, ast.Yield) and n.value is not None:
                    value, kind = n.value, "yield"
                if value is not None:
                    t = by_pos.get((value.lineno, value.col_offset, value.end_lineno, value.end_col_offset))
                    try:
                        texts[kind].add(render(t) if t is not None else None)
                    except Unknown:
                        texts[kind].add(None)
                todo += ast.iter_child_nodes(n)
            for kind, found in texts.items():
                found.discard("None") if len(found) > 1 else None
                if len(found) == 1 and None not in found:
                    new += INFERRED.setdefault((f, node.lineno, kind), next(iter(found))) is not None
    # arguments
    path_of = {m: f for f, m in project.module.items()}
    seen = {}
    for f in project.sources:
        tree = result.files.get(project.module[f])
        if tree is None or f.split("/")[0] in ("operator", "worker", "scripts"):
            continue
        for o in walk(tree):
            if not isinstance(o, nodes.CallExpr):
                continue
            d = o.callee.node if isinstance(o.callee, nodes.RefExpr) else None
            bound = 0
            if isinstance(o.callee, nodes.MemberExpr) and o.callee in result.types:
                t = mt.get_proper_type(result.types[o.callee])
                if isinstance(t, mt.CallableType) and isinstance(t.definition, nodes.FuncDef):
                    d, bound = t.definition, 1
            if isinstance(d, nodes.TypeInfo):
                s = d.names.get("__init__")
                if s and not s.plugin_generated:
                    d, bound = s.node, 1
            if isinstance(d, nodes.Decorator):
                d = d.func
            if not isinstance(d, nodes.FuncDef):
                continue
            module = d.fullname
            while module and module not in path_of:
                module = module.rpartition(".")[0]
            if not module.startswith("x__"):
                continue
            names = [a.variable.name for a in d.arguments]
            i = bound
            for arg, kind, name in zip(o.args, o.arg_kinds, o.arg_names):
                if kind == nodes.ARG_POS:
                    target, i = (names[i] if i < len(names) else None), i + 1
                elif kind == nodes.ARG_NAMED:
                    target = name
                else:
                    break
                a = next((a for a in d.arguments if a.variable.name == target), None)
                if a is None or a.type_annotation is not None or arg not in result.types:
                    continue
                try:
                    text = render(result.types[arg])
                except Unknown:
                    continue
                seen.setdefault((path_of[module], d.line, target), set()).add(text)
    for key, texts in seen.items():
        texts.discard("None")
        if len(texts) == 1 and key not in INFERRED:
            INFERRED[key] = next(iter(texts))
    return len(INFERRED)


def modules_in(project, text):
    found = set()
    for dotted in re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", text):
        parts = dotted.split(".")
        for n in range(len(parts) - 1, 0, -1):
            m = ".".join(parts[:n])
            if m in project.path_of or m.split(".")[0] not in ("cleave", "cleave_worker") and not m.startswith("x__"):
                found.add(m)
                break
    return found


def fixtures_of(project, path):
    """name -> annotation (an expression), qualifying module for those of a file."""
    if path not in _FIXTURES:
        found = {}
        for node in ast.parse(project.read(path)).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
                "fixture" in ast.unparse(d) for d in node.decorator_list
            ):
                found[node.name] = node
        _FIXTURES[path] = found
    return _FIXTURES[path]


def annotation_of(node):
    """What a fixture gives, as an expression; None: unknown."""
    a = node.returns
    if isinstance(a, ast.Constant) and isinstance(a.value, str):
        a = ast.parse(a.value, mode="eval").body
    if a is None:
        return None
    yields = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node))
    if yields and isinstance(a, ast.Subscript):
        a = a.slice.elts[0] if isinstance(a.slice, ast.Tuple) else a.slice
    return a


class Qualify(ast.NodeTransformer):
    def __init__(self, alias):
        self.alias = alias

    def visit_Name(self, node):
        import builtins

        if hasattr(builtins, node.id):
            return node
        return ast.Attribute(ast.Name(self.alias, ast.Load()), node.id, ast.Load())

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            try:
                return self.visit(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return node
        return node


def annotate(project, path, text):
    """The text with the types of fixtures behind the parameters of tests; lines stay."""
    if not path.startswith(("tests/", "e2e/", "benchmarks/")):
        return text
    tree = ast.parse(text)
    sources = [path]
    folder = Path(path).parent
    while str(folder) != ".":
        conftest = str(folder / "conftest.py")
        if conftest in project.module and conftest != path:
            sources.append(conftest)
        folder = folder.parent
    lines = text.splitlines(keepends=True)
    inserts, modules, plain = [], set(), set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        is_fixture = any("fixture" in ast.unparse(d) for d in node.decorator_list)
        if node.returns is None and (path, node.lineno, "return") in INFERRED and not any(
            isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node)
        ):
            t = INFERRED[path, node.lineno, "return"].replace(project.module[path] + ".", "")
            first = node.body[0]
            head = "".join(lines[node.lineno - 1 : first.lineno])
            # The colon that ends the head: the last `):` before the body.
            where = None
            for row in range(node.lineno - 1, min(first.lineno, len(lines))):
                m = re.search(r"\)(:)\s*(#.*)?$", lines[row].rstrip("\n"))
                if m:
                    where = (row, m.start(1))
                    break
            if where:
                inserts.append((where[0], where[1], f' -> "{t}"'))
                plain |= modules_in(project, t)
        if not (node.name.startswith("test_") or is_fixture):
            for arg in [*node.args.args, *node.args.kwonlyargs]:
                if arg.annotation is None and (t := INFERRED.get((path, node.lineno, arg.arg))):
                    t = t.replace(project.module[path] + ".", "")
                    inserts.append((arg.end_lineno - 1, arg.end_col_offset, f': "{t}"'))
                    plain |= modules_in(project, t)
            continue
        for arg in [*node.args.args, *node.args.kwonlyargs]:
            if arg.annotation is not None or arg.arg == "self":
                continue
            for source in sources:
                fixture = fixtures_of(project, source).get(arg.arg)
                if fixture is None or fixture is node or (source == path and arg.arg == node.name):
                    continue
                a = annotation_of(fixture)
                if a is None:
                    t = INFERRED.get((source, fixture.lineno, "yield")) or INFERRED.get((source, fixture.lineno, "return"))
                    if t:
                        t = t.replace(project.module[path] + ".", "")
                        inserts.append((arg.end_lineno - 1, arg.end_col_offset, f': "{t}"'))
                        plain |= modules_in(project, t)
                    break
                import copy

                if source != path:
                    alias = "F_" + project.module[source]
                    modules.add(source)
                    a = Qualify(alias).visit(copy.deepcopy(a))
                inserts.append((arg.end_lineno - 1, arg.end_col_offset, f": {ast.unparse(a)!r}"))
                break
    if modules or plain:
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno == node.end_lineno:
                if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                    continue
                i = node.lineno - 1
                more = "; ".join(
                    [f"import {project.module[m]} as F_{project.module[m]}" for m in sorted(modules)]
                    + [f"import {m}" for m in sorted(plain | {"typing"}) if m != project.module[path]]
                )
                lines[i] = lines[i].split("  #")[0].rstrip("\n") + f"; {more}\n"
                break
        else:
            return text
    for line, col, new in sorted(inserts, reverse=True):
        lines[line] = lines[line][:col] + new + lines[line][col:]
    return "".join(lines)


class Collector:
    def __init__(self, types, out) -> None:
        self.types = types
        self.out = out

    def _pos(self, o):
        return (o.line, o.column, o.end_line, o.end_column)

    def collect(self, tree):
        for o in walk(tree):
            if isinstance(o, nodes.MemberExpr):
                self.visit_member_expr(o)
            elif isinstance(o, nodes.SuperExpr):
                self.visit_super_expr(o)
            elif isinstance(o, nodes.CallExpr):
                self.visit_call_expr(o)
            elif isinstance(o, nodes.ClassDef):
                self.visit_class_def(o)

    def visit_member_expr(self, o) -> None:
        base = o.expr
        found = None
        if base in self.types:
            found = members(self.types[base], o.name)
        elif isinstance(base, nodes.RefExpr) and isinstance(base.node, nodes.TypeInfo):
            found = lookup(base.node, o.name)
        elif isinstance(base, nodes.RefExpr) and isinstance(base.node, nodes.MypyFile):
            found = [("module", base.node.fullname)]
        self.out["members"][self._pos(o)] = found

    def visit_super_expr(self, o) -> None:
        found = []
        if o.info:
            for base in o.info.mro[1:]:
                if o.name in base.names:
                    found = [("class", base.fullname)]
                    break
        self.out["members"][self._pos(o)] = found

    def visit_call_expr(self, o) -> None:
        if any(o.arg_names) or True:
            self.out["calls"][self._pos(o)] = callee(o, self.types)
            if o.args and o.args[0] in self.types:
                self.out["first"][self._pos(o)] = class_names(self.types[o.args[0]])
            name = getattr(o.callee, "name", "")
            if name in ("asdict", "astuple", "fields", "encode", "dumps", "vars", "_asdict", "to_builtins"):
                target = o.args[0] if o.args else getattr(o.callee, "expr", None)
                if target in self.types:
                    self.out["serialised"].append((name, self._pos(o), class_names(self.types[target])))

    def visit_class_def(self, o) -> None:
        self.out["classes"][o.line] = o.info.fullname
        # decorators may move the line
        self.out["class_names"].setdefault(o.name, []).append(o.info.fullname)


def flat(t, seen=None):
    t = mt.get_proper_type(t)
    if t is None:
        return
    if isinstance(t, mt.UnionType):
        for item in t.items:
            yield from flat(item)
    elif isinstance(t, mt.Instance):
        if t.type.fullname == "builtins.type" and t.args:
            yield from flat(t.args[0])
        else:
            yield t.type
    elif isinstance(t, mt.TypeType):
        yield from flat(t.item)
    elif isinstance(t, mt.CallableType):
        if t.is_type_obj():
            yield from flat(t.ret_type)
        else:
            yield t.fallback.type
    elif isinstance(t, mt.Overloaded):
        yield from flat(t.items[0])
    elif isinstance(t, (mt.TypeVarType, mt.ParamSpecType)):
        yield from flat(t.upper_bound)
    elif isinstance(t, mt.TupleType):
        yield t.partial_fallback.type
    elif isinstance(t, mt.LiteralType):
        yield t.fallback.type
    elif isinstance(t, mt.TypedDictType):
        yield t.fallback.type
    elif isinstance(t, mt.AnyType):
        yield None


def class_names(t):
    return [i.fullname for i in flat(t) if i is not None]


def lookup(info, name):
    for base in info.mro:
        if name in base.names:
            return [("class", base.fullname)]
    return []


def members(t, name):
    found = []
    for info in flat(t):
        if info is None:
            found.append(("any", ""))
        else:
            found += lookup(info, name) or []
    return list(dict.fromkeys(found))


def callee(o, types):
    """What a call calls: ('class', fullname) or ('def', fullname), several of a union."""
    found = []
    c = o.callee
    if isinstance(c, nodes.RefExpr):
        node = c.node
        if isinstance(node, nodes.TypeInfo):
            return [("class", node.fullname)]
        if isinstance(node, (nodes.FuncDef, nodes.OverloadedFuncDef, nodes.Decorator)):
            return [("def", node.fullname)]
        if isinstance(node, nodes.TypeAlias) and isinstance(c, nodes.RefExpr):
            found += [("class", n) for n in class_names(node.target)]
            return found
    if isinstance(c, nodes.MemberExpr) and c.expr in types:
        for kind, name in members(types[c.expr], c.name):
            if kind == "class":
                found.append(("def", f"{name}.{c.name}"))
    if isinstance(c, nodes.SuperExpr) and c.info:
        for base in c.info.mro[1:]:
            if c.name in base.names:
                found.append(("def", f"{base.fullname}.{c.name}"))
                break
    if c in types:
        t = mt.get_proper_type(types[c])
        for item in t.items if isinstance(t, mt.UnionType) else [t]:
            item = mt.get_proper_type(item)
            if isinstance(item, mt.CallableType) and item.is_type_obj():
                found.append(("class", item.type_object().fullname))
            elif isinstance(item, mt.CallableType) and item.definition is not None:
                fullname = getattr(item.definition, "fullname", None)
                if fullname:
                    found.append(("def", fullname))
            elif isinstance(item, mt.TypeType):
                found += [("class", n) for n in class_names(item)]
            elif isinstance(item, mt.Instance):
                found += [(("def"), f"{cls}.__call__") for _, cls in lookup(item.type, "__call__")]
            elif isinstance(item, mt.Overloaded) and item.is_type_obj():
                found.append(("class", item.type_object().fullname))
    return list(dict.fromkeys(found))


def run(root: Path, quiet=False, rounds=2):
    start = time.time()
    project = Project(root)
    options = Options()
    parse_config_file(options, lambda: None, str(root / "pyproject.toml"))
    options.packages = None
    options.check_untyped_defs = True
    options.preserve_asts = True
    options.export_types = True
    options.incremental = False
    options.cache_dir = "/dev/null"
    options.fine_grained_incremental = False
    options.ignore_errors = False
    options.python_version = (3, 11)
    options.python_executable = str(root / ".venv" / "bin" / "python")
    options.mypy_path = [str(root / "operator"), str(root / "worker")]
    options.namespace_packages = True
    options.explicit_package_bases = True
    options.warn_unused_ignores = False
    options.warn_unreachable = False
    options.per_module_options.clear()
    options.ignore_missing_imports = True
    options.show_traceback = True
    options.hide_error_codes = False
    options.native_parser = False
    options.plugins = ["pydantic.mypy"]
    for pattern in ("vllm.*", "torch.*", "transformers.*", "tokenizers.*", "nixl.*", "sklearn.*", "plotly.*", "kubernetes.*", "scipy.*"):
        options.per_module_options[pattern] = {"ignore_missing_imports": True, "follow_imports": "skip"}
    options._glob_options = []
    options.build_per_module_cache()
    if rounds:
        for i in range(rounds):
            sources = [BuildSource(str(root / f), project.module[f], annotated(project, f)) for f in project.sources]
            result = build.build(sources, options)
            print(f"round {i}: {infer(project, result)} types inferred, {time.time() - start:.0f} s")
    sources = [
        BuildSource(str(root / f), project.module[f], annotated(project, f))
        for f in project.sources
    ]
    from mypy.find_sources import SourceFinder  # noqa: F401
    result = build.build(sources, options)
    files = {}
    infos = {}
    for f in project.sources:
        tree = result.files.get(project.module[f])
        if tree is None:
            print("no tree", f)
            continue
        out = {"members": {}, "calls": {}, "first": {}, "classes": {}, "class_names": {}, "serialised": []}
        Collector(result.types, out).collect(tree)
        files[f] = out
    seen = set()

    def add(info):
        if info.fullname in seen:
            return
        seen.add(info.fullname)
        kinds = set()
        mro = [b.fullname for b in info.mro]
        if "dataclass" in info.metadata or "dataclass_tag" in info.metadata:
            kinds.add("dataclass")
        if "pydantic.main.BaseModel" in mro:
            kinds.add("pydantic")
        if "msgspec.Struct" in mro:
            kinds.add("struct")
        if info.is_named_tuple:
            kinds.add("namedtuple")
        if info.is_enum:
            kinds.add("enum")
        if info.is_protocol:
            kinds.add("protocol")
        if info.typeddict_type is not None:
            kinds.add("typeddict")
        init = None
        for b in info.mro:
            if "__init__" in b.names:
                init = (b.fullname, bool(b.names["__init__"].plugin_generated))
                break
        infos[info.fullname] = {
            "module": info.module_name,
            "name": info.name,
            "mro": mro,
            "names": {n: bool(s.plugin_generated) for n, s in info.names.items()},
            "kinds": kinds,
            "init": init,
            "line": info.defn.line,
            "any_base": info.fallback_to_any,
        }
        for b in info.mro:
            add(b)

    all_infos = {}
    for f in project.sources:
        tree = result.files.get(project.module[f])
        if tree:
            for o in walk(tree):
                if isinstance(o, nodes.ClassDef):
                    add(o.info)
                    all_infos[o.info.fullname] = o.info
    # Protocols that classes implement
    from mypy.subtypes import is_protocol_implementation
    from mypy.typevars import fill_typevars
    from mypy.state import state

    protocols = [i for i in all_infos.values() if i.is_protocol]
    implements = []
    with state.strict_optional_set(True):
        for proto in protocols:
            need = {n for n in proto.protocol_members}
            for info in all_infos.values():
                if info is proto or not need:
                    continue
                if all(info.has_readable_member(n) for n in need):
                    exact = None
                    try:
                        exact = is_protocol_implementation(fill_typevars(info), fill_typevars(proto))
                    except Exception:
                        pass
                    implements.append((proto.fullname, info.fullname, sorted(need), exact))
    data = {"files": files, "infos": infos, "implements": implements, "errors": result.errors}
    if not quiet:
        print(f"{len(files)} files, {len(infos)} classes, {len(result.errors)} mypy errors, {time.time() - start:.0f} s")
    return data


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    data = run(root)
    Path(sys.argv[2]).write_bytes(pickle.dumps(data))
    Path(sys.argv[2] + ".errors").write_text("\n".join(data["errors"]))
