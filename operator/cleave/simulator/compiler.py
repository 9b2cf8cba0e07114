"""Compiles plain functions and all functions of Cleave that they call, and caches the machine code.

Called by `run`. What is hard: the same functions run uncompiled in the router and in engines, so
they cannot be decorated; they are cloned instead, with compiled clones in place of the functions
that they call. And numba's cache on disk detects changes only in the file of the outermost
function, by its path and time, so the cache folder is named by a hash of all sources involved.
"""

import dis
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

Function = Callable[..., Any]

_MAX_VERSIONS = 4
"""Number of versions whose machine code stays in the cache."""
_FOLDER = "cleave-simulator"


def compile_function(function: Function, replacements: dict[Function, Any]) -> Function:
    """A compiled `function`, from the cache or compiled at its first call.

    `replacements`: for some of the functions that it calls, compiled or plain. All called functions
    must be in numba's subset of Python and take only types that numba supports.
    """
    import numba

    clones = dict(replacements)

    def clone(inner: FunctionType, **more: bool) -> Function:
        names = dict(inner.__globals__)
        for name in _find_globals(inner):
            called = names.get(name)
            if isinstance(called, FunctionType) and called.__module__.startswith("cleave."):
                replacement = clones.get(called, called)
                if isinstance(replacement, FunctionType):
                    inner_clone = clone(replacement, no_cpython_wrapper=True, no_cfunc_wrapper=True)
                    clones[called] = clones[replacement] = inner_clone
                names[name] = clones[called]
        copy = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__)
        copy.__module__ = inner.__module__
        copy.__qualname__ = inner.__qualname__
        # Compiled code allocates nothing, so reference counting is not needed.
        compiled: Function = numba.njit(copy, error_model="numpy", _nrt=False, **more)
        return compiled

    assert isinstance(function, FunctionType)
    folder = _find_cache(_hash_sources(function))
    before = numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES
    numba.config.CACHE_DIR = str(folder)
    numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{HashedFolderLocator.__qualname__}"
    try:
        return clone(function, cache=True, nogil=True, no_cfunc_wrapper=True)
    finally:
        numba.config.CACHE_DIR, numba.config.CACHE_LOCATOR_CLASSES = before


class HashedFolderLocator:
    """Makes numba cache in its CACHE_DIR, which is named by a hash of the sources.

    Numba's own locators add the path of the source and its time. All checkouts and installations of
    one version share the code instead.
    """

    def __init__(self, folder: str, line: int) -> None:
        self._folder = folder
        self._line = line

    @classmethod
    def from_function(cls, function: FunctionType, _file: str) -> "HashedFolderLocator":
        """The locator of `function`; numba calls this while it decorates."""
        import numba

        return cls(numba.config.CACHE_DIR, function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        """Create the folder; raises OSError when it cannot be written."""
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self._folder).close()

    def get_cache_path(self) -> str:
        """The folder of numba's index and code."""
        return self._folder

    def get_source_stamp(self) -> None:
        """Nothing: other sources have another folder."""

    def get_disambiguator(self) -> str:
        """Distinguishes functions of one name."""
        return str(self._line)


def find_sources(function: Function) -> list[Path]:
    """The files that define `function` and the functions of Cleave that it calls. All files of this
    package are included, because the origin of a constant cannot be traced."""
    files = {str(file) for file in Path(__file__).parent.glob("*.py")}
    visited: set[Function] = set()
    pending = [function]
    while pending:
        inner = pending.pop()
        if inner in visited or not isinstance(inner, FunctionType):
            continue
        visited.add(inner)
        files.add(inner.__code__.co_filename)
        for name in _find_globals(inner):
            called = inner.__globals__.get(name)
            module = getattr(called, "__module__", None) or ""
            if module.startswith("cleave."):
                files.add(str(sys.modules[module].__file__))
                pending.append(called)  # type: ignore[arg-type]
    return [Path(file) for file in sorted(files)]


def _find_globals(function: FunctionType) -> set[str]:
    """Names of the module globals that the function reads."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}


def is_compiled(function: Function) -> bool:
    """Whether the cache holds machine code for exactly these sources; does not import numba."""
    return any(_find_cache(_hash_sources(function)).rglob("*.nbi"))


def _hash_sources(function: Function) -> str:
    digest = hashlib.blake2b(f"{version('numba')} {sys.version_info}".encode(), digest_size=8)
    for file in find_sources(function):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _find_cache(name: str) -> Path:
    """A writable cache folder: in the user's cache, else a private folder for temporary files."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    first = Path(given or home) / _FOLDER
    folder = first / name
    try:
        if not folder.exists():
            first.mkdir(parents=True, exist_ok=True)
            _create_cache(folder)
            _prune_cache(first)
    except OSError:
        return _create_private_folder(name)
    return folder if os.access(folder, os.W_OK) else _create_private_folder(name)


def _create_cache(folder: Path) -> None:
    """Create the folder and copy the machine code that an image ships in a read-only place."""
    shipped = Path(sys.prefix) / "share" / _FOLDER / folder.name
    if not shipped.is_dir():
        folder.mkdir()
        return
    # Copy under another name first: numba would read incomplete files.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-") as new:
        copied = shutil.copytree(shipped, Path(new) / folder.name)
        os.utime(copied)
        try:
            copied.rename(folder)
        except OSError:
            # Another process has created the folder.
            if not folder.is_dir():
                raise


def _prune_cache(cache: Path) -> None:
    """Delete all but the latest versions; each takes some MB."""
    versions = sorted(cache.iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in versions[:-_MAX_VERSIONS]:
        shutil.rmtree(folder, ignore_errors=True)


def _create_private_folder(name: str) -> Path:
    """A folder for temporary files that only this user can access."""
    folder = Path(tempfile.gettempdir()) / f"cleave-simulator-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return folder / name
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cleave-simulator-"))
