"""Names of one Python file: scopes, bindings and every occurrence with its exact offset."""

import ast
import builtins
import re
from dataclasses import dataclass, field

BUILTINS = set(dir(builtins))


class Scope:
    def __init__(self, kind, parent, node, name, index):
        self.kind, self.parent, self.node, self.name, self.index = kind, parent, node, name, index
        self.bound: dict[str, list] = {}
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.children = []

    @property
    def qual(self):
        if self.kind == "module":
            return ""
        up = self.parent.qual
        if self.parent.kind in ("function",):
            up = f"{up}.<locals>"
        return f"{up}.{self.name}" if up else self.name

    def __repr__(self):
        return f"<{self.kind} {self.qual}>"


@dataclass
class Occurrence:
    start: int
    name: str
    scope: Scope
    """Where it is written."""
    kind: str
    """load, store, def, class, param, import, global, except, match"""
    node: object = None
    target: object = None
    """The scope that it is bound in, None: builtin or unknown."""


@dataclass
class Import:
    node: ast.stmt
    alias: ast.alias
    start: int
    scope: Scope
    module: str | None
    """of `from module import`"""
    bound: str = ""


class File:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._raw = text.splitlines(keepends=True)
        self.occurrences: list[Occurrence] = []
        self.imports: list[Import] = []
        self.scopes: list[Scope] = []
        self.attributes: list[tuple[ast.Attribute, int, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.matches: list[tuple[ast.MatchClass, Scope]] = []
        self.classes: list[tuple[ast.ClassDef, Scope]] = []
        self.strings: list[tuple[ast.Constant, Scope]] = []
        self.functions = []
        self.inner_offsets: dict[int, tuple] = {}
        self.at: dict[int, object] = {}
        self._shift = None
        self.module = self._scope("module", None, self.tree, "")
        self._visit_body(self.tree.body, self.module)
        self._resolve()

    # positions
    def offset(self, line: int, col: int) -> int:
        if self._shift is not None:
            return self._shift + col
        start = self._lines[line - 1]
        raw = self._raw[line - 1] if line <= len(self._raw) else ""
        if raw.isascii():
            return start + col
        return start + len(raw.encode()[:col].decode(errors="ignore"))

    def start(self, node) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node) -> int:
        if self._shift is not None:
            return self._shift + node.end_col_offset
        return self.offset(node.end_lineno, node.end_col_offset)

    def line_of(self, offset: int) -> int:
        import bisect

        return bisect.bisect_right(self._lines, offset)

    def _scope(self, kind, parent, node, name):
        scope = Scope(kind, parent, node, name, len(self.scopes))
        self.scopes.append(scope)
        if parent:
            parent.children.append(scope)
        return scope

    def _bind(self, scope, name, info=None):
        scope.bound.setdefault(name, []).append(info)

    def _occur(self, start, name, scope, kind, node=None):
        assert self.text[start : start + len(name)] == name, (name, self.text[start : start + 20], kind)
        o = Occurrence(start, name, scope, kind, node)
        self.occurrences.append(o)
        return o

    # traversal
    def _visit_body(self, body, scope):
        for node in body:
            self._visit(node, scope)

    def _find(self, pattern, start):
        return re.compile(pattern).search(self.text, start)

    def _annotation(self, node, scope):
        if node is None:
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            raw = ast.get_source_segment(self.text, node) if self._shift is None else None
            if raw and raw[0] in "\"'" and not raw.startswith(('"""', "'''")) and raw[1:-1] == node.value:
                try:
                    inner = ast.parse(node.value, mode="eval").body
                except SyntaxError:
                    return
                shift = self.start(node) + 1
                self._shift = shift
                try:
                    self._annotation(inner, scope)
                finally:
                    self._shift = None
            return
        if isinstance(node, ast.Subscript):
            self._visit(node.value, scope)
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if name == "Literal":
                self._visit(node.slice, scope)
                return
            if name == "Annotated" and isinstance(node.slice, ast.Tuple):
                self._annotation(node.slice.elts[0], scope)
                for rest in node.slice.elts[1:]:
                    self._visit(rest, scope)
                return
            self._annotation(node.slice, scope)
            return
        if isinstance(node, (ast.Tuple, ast.List)):
            for each in node.elts:
                self._annotation(each, scope)
            return
        if isinstance(node, ast.BinOp):
            self._annotation(node.left, scope)
            self._annotation(node.right, scope)
            return
        self._visit(node, scope)

    def _args(self, args, scope, outer):
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        for extra in (args.vararg, args.kwarg):
            if extra:
                every.append(extra)
        for default in [*args.defaults, *args.kw_defaults]:
            if default is not None:
                self._visit(default, outer)
        for arg in every:
            self._annotation(arg.annotation, outer)
            self._bind(scope, arg.arg, ("param", arg))
            self._occur(self.start(arg), arg.arg, scope, "param", arg)

    def _visit(self, node, scope):
        method = getattr(self, f"_visit_{type(node).__name__}", None)
        if method:
            method(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self._visit(child, scope)

    def _function(self, node, scope):
        for decorator in node.decorator_list:
            self._visit(decorator, scope)
        found = self._find(r"\bdef\s+", self.start(node))
        self._bind(scope, node.name, ("def", node))
        self._occur(found.end(), node.name, scope, "def", node)
        inner = self._scope("function", scope, node, node.name)
        self.functions.append((node, scope, inner))
        for p in getattr(node, "type_params", []):
            self._visit(p, inner)
        self._args(node.args, inner, scope)
        self._annotation(node.returns, scope)
        self._visit_body(node.body, inner)

    _visit_FunctionDef = _function
    _visit_AsyncFunctionDef = _function

    def _visit_Lambda(self, node, scope):
        inner = self._scope("function", scope, node, "<lambda>")
        self._args(node.args, inner, scope)
        self._visit(node.body, inner)

    def _visit_ClassDef(self, node, scope):
        for decorator in node.decorator_list:
            self._visit(decorator, scope)
        found = self._find(r"\bclass\s+", self.start(node))
        self._bind(scope, node.name, ("class", node))
        self._occur(found.end(), node.name, scope, "class", node)
        for base in node.bases:
            self._annotation(base, scope)
        for keyword in node.keywords:
            self._visit(keyword.value, scope)
        inner = self._scope("class", scope, node, node.name)
        self.classes.append((node, inner))
        self._visit_body(node.body, inner)

    def _comprehension(self, node, scope):
        inner = self._scope("comprehension", scope, node, "<comp>")
        for i, generator in enumerate(node.generators):
            self._visit(generator.iter, scope if i == 0 else inner)
            self._visit(generator.target, inner)
            for each in generator.ifs:
                self._visit(each, inner)
        if isinstance(node, ast.DictComp):
            self._visit(node.key, inner)
            self._visit(node.value, inner)
        else:
            self._visit(node.elt, inner)

    _visit_ListComp = _visit_SetComp = _visit_GeneratorExp = _visit_DictComp = _comprehension

    def _visit_NamedExpr(self, node, scope):
        self._visit(node.value, scope)
        target = scope
        while target.kind == "comprehension":
            target = target.parent
        self._bind(target, node.target.id, ("store", node))
        self._occur(self.start(node.target), node.target.id, scope, "store", node.target)

    def _visit_Name(self, node, scope):
        if isinstance(node.ctx, (ast.Store, ast.Del)):
            self._bind(scope, node.id, ("store", node))
            self._occur(self.start(node), node.id, scope, "store", node)
        else:
            self._occur(self.start(node), node.id, scope, "load", node)

    def _visit_Attribute(self, node, scope):
        self._visit(node.value, scope)
        at = self.end(node) - len(node.attr)
        if self.text[at : at + len(node.attr)] == node.attr:
            self.attributes.append((node, at, scope))
            if self._shift is not None:
                self.inner_offsets[at] = node

    def _visit_Call(self, node, scope):
        self.calls.append((node, scope))
        self._visit(node.func, scope)
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        for i, arg in enumerate(node.args):
            if i == 0 and name == "cast":
                self._annotation(arg, scope)
            else:
                self._visit(arg, scope)
        for keyword in node.keywords:
            self._visit(keyword.value, scope)

    def _visit_AnnAssign(self, node, scope):
        self._annotation(node.annotation, scope)
        if node.value:
            self._visit(node.value, scope)
        self._visit(node.target, scope)

    def _visit_Subscript(self, node, scope):
        """Forward references in the value of an alias: `Draw = Callable[["View"], None]`."""
        name = getattr(node.value, "id", getattr(node.value, "attr", ""))
        if name in ("Callable", "Mapping", "Sequence", "Iterable", "Iterator", "Awaitable", "Optional", "Union", "list", "dict", "tuple", "type", "set") and isinstance(node.ctx, ast.Load):
            self._annotation(node, scope)
        else:
            self.generic(node, scope)

    def generic(self, node, scope):
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _visit_Constant(self, node, scope):
        if isinstance(node.value, str) and self._shift is None:
            self.strings.append((node, scope))

    def _import(self, node, scope, module):
        for alias in node.names:
            if alias.name == "*":
                continue
            start = self.start(alias)
            bound = alias.asname or (alias.name if module is not None else alias.name.split(".")[0])
            entry = Import(node, alias, start, scope, module, bound)
            self.imports.append(entry)
            self._bind(scope, bound, ("import", entry))
            at = self.end(alias) - len(alias.asname) if alias.asname else start
            self._occur(at, bound, scope, "import", entry)

    def _visit_Import(self, node, scope):
        self._import(node, scope, None)

    def _visit_ImportFrom(self, node, scope):
        self._import(node, scope, "." * node.level + (node.module or ""))

    def _visit_ExceptHandler(self, node, scope):
        if node.type:
            self._visit(node.type, scope)
        if node.name:
            found = self._find(r"\bas\s+", self.end(node.type))
            self._bind(scope, node.name, ("except", node))
            self._occur(found.end(), node.name, scope, "except", node)
        self._visit_body(node.body, scope)

    def _visit_Global(self, node, scope):
        target = scope.globals if isinstance(node, ast.Global) else scope.nonlocals
        at = self.start(node)
        for name in node.names:
            target.add(name)
            found = self._find(rf"\b{name}\b", at)
            at = found.start()
            self._occur(at, name, scope, "global", node)

    _visit_Nonlocal = _visit_Global

    def _visit_MatchAs(self, node, scope):
        if node.pattern:
            self._visit(node.pattern, scope)
        if node.name:
            at = self.end(node) - len(node.name)
            self._bind(scope, node.name, ("match", node))
            self._occur(at, node.name, scope, "match", node)

    def _visit_MatchStar(self, node, scope):
        if node.name:
            at = self.end(node) - len(node.name)
            self._bind(scope, node.name, ("match", node))
            self._occur(at, node.name, scope, "match", node)

    def _visit_MatchMapping(self, node, scope):
        for child in [*node.keys, *node.patterns]:
            self._visit(child, scope)
        if node.rest:
            found = list(re.finditer(rf"\*\*\s*({node.rest})\b", self.text[self.start(node) : self.end(node)]))[-1]
            self._bind(scope, node.rest, ("match", node))
            self._occur(self.start(node) + found.start(1), node.rest, scope, "match", node)

    def _visit_MatchClass(self, node, scope):
        self.matches.append((node, scope))
        self._visit(node.cls, scope)
        for child in [*node.patterns, *node.kwd_patterns]:
            self._visit(child, scope)

    # resolution
    def lookup(self, scope, name):
        first = True
        while scope is not None:
            if name in scope.globals:
                return self.module
            if name in scope.nonlocals:
                scope = scope.parent
                first = False
                continue
            if name in scope.bound and (scope.kind != "class" or first):
                return scope
            # A comprehension's body inside a class does not see the class either.
            if scope.kind != "comprehension":
                first = False
            if scope.kind == "comprehension":
                first = False
            scope = scope.parent
        return None

    def _resolve(self):
        for o in self.occurrences:
            if o.kind in ("param", "def", "class", "import"):
                o.target = o.scope if o.name not in o.scope.globals else self.module
            else:
                o.target = self.lookup(o.scope, o.name)
        self.by_binding = {}
        for o in self.occurrences:
            if o.target is not None:
                self.by_binding.setdefault((o.target.index, o.name), []).append(o)
