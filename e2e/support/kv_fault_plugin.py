"""Damages the KV that a vLLM engine pulls through shared memory, as long as a file says so.

A copy of this file named sitecustomize.py on PYTHONPATH is imported by every Python process of the
engine. It waits for the import of the transport, as an early import of torch would disturb vLLM.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH = "KV_FAULT_FILE"
"""Environment variable with the path of the file; its content: empty, swapped or lost."""
TARGET = "cleave_worker.transfer.transports.shared_memory"


class Finder(MetaPathFinder):
    """Changes the transport's module once it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == TARGET else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            link: Any = module
            link.SharedMemoryLink.read = damage(link.SharedMemoryLink.read)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def damage(read: Callable[..., None]) -> Callable[..., None]:
    def read_damaged(self: Any, copies: Any, seconds: float) -> None:
        kind = Path(os.environ[SWITCH]).read_text()
        if kind == "lost":
            raise OSError("lost by the test")
        if kind == "swapped":
            copies = list(copies)
            remotes = [each.remote for each in copies]
            pairs = zip(remotes[1:] + remotes[:1], copies, strict=True)
            copies = [each._replace(remote=remote) for remote, each in pairs]
        read(self, copies, seconds)

    return read_damaged


if SWITCH in os.environ:
    sys.meta_path.insert(0, Finder())
