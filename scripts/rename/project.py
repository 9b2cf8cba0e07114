"""What the tools know of the project: its files, the module name of each, how bare imports resolve."""

import ast
import re
import subprocess
import tomllib
from functools import cached_property
from pathlib import Path

_FOREIGN = {"pytest", "numpy", "httpx", "yaml", "vllm", "torch", "grpc", "rich", "typer", "msgspec"}
TOPS = {"operator": "cleave", "worker": "cleave_worker"}


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        done = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
        )
        self.files = [f for f in dict.fromkeys(done.stdout.splitlines()) if (self.root / f).is_file()]
        self.python = [f for f in self.files if f.endswith(".py")]
        self.sources = [f for f in self.python if "/rpc/v1/" not in f]

    @cached_property
    def config(self) -> dict:
        return tomllib.loads((self.root / "pyproject.toml").read_text())

    @cached_property
    def pythonpath(self) -> list[str]:
        return self.config["tool"]["pytest"]["ini_options"]["pythonpath"]

    @cached_property
    def module(self) -> dict[str, str]:
        """path -> unique module name."""
        names = {}
        for f in self.python:
            names[f] = self.name_of(f)
        return names

    @staticmethod
    def name_of(f: str) -> str:
        parts = f.removesuffix(".py").split("/")
        if parts[0] in TOPS and parts[1:2] == [TOPS[parts[0]]]:
            parts = parts[1:]
            if parts[-1] == "__init__":
                parts.pop()
            return ".".join(parts)
        if parts[-1] == "__init__":
            parts.pop()
        return "x__" + "__".join(re.sub(r"\W", "_", p) for p in parts)

    @cached_property
    def path_of(self) -> dict[str, str]:
        return {m: f for f, m in self.module.items()}

    @cached_property
    def _python_set(self) -> set[str]:
        return set(self.python)

    def _at(self, folder: str, dotted: str) -> str | None:
        stem = f"{folder}/{dotted.replace('.', '/')}" if folder not in ("", ".") else dotted.replace(".", "/")
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if candidate in self._python_set:
                return candidate
        return None

    def resolve(self, importer: str, dotted: str) -> str | None:
        """Path of the module that `importer` means by an absolute import of `dotted`; None if foreign."""
        first = dotted.split(".")[0]
        if first in TOPS.values():
            return self.path_of.get(dotted)
        if importer.split("/")[0] in TOPS:
            return None
        folder = str(Path(importer).parent)
        parts = folder.split("/")
        folders = [folder]
        if parts[:2] == ["tests", "benchmarks"] and len(parts) > 2:
            folders.append("/".join(parts[1:]))
        folders.append(str(Path(folder).parent))
        folders += self.pythonpath + ["."]
        key = (importer, dotted)
        if key in self._resolved:
            return self._resolved[key]
        self._resolved[key] = None
        self._resolved[key] = found = self._search(importer, dotted, folders)
        return found

    @cached_property
    def _resolved(self) -> dict:
        return {}

    @cached_property
    def _helper_folders(self) -> list[str]:
        return sorted({str(Path(p).parent) for p in self.python if not p.startswith(("operator/", "worker/"))})

    def _search(self, importer, dotted, folders):
        text = (self.root / importer).read_text()
        for f in folders:
            if found := self._at(f, dotted):
                return found
        candidates = []
        for other in self._helper_folders:
            if found := self._at(other, dotted):
                candidates.append(found)
        import sys as _sys
        if dotted.split(".")[0] in _sys.stdlib_module_names or dotted.split(".")[0] in _FOREIGN:
            return None
        named = [c for c in candidates if re.search(rf'"[^"]*\b{re.escape(Path(c).parent.name)}\b', text)]
        pick = named or candidates
        return pick[0] if len(pick) >= 1 else None

    def read(self, f: str) -> str:
        return (self.root / f).read_text()
