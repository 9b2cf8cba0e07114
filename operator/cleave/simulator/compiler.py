"""Compiles plain functions and all functions of Cleave that they call, and caches the machine code.

Called by `run`. What is hard: the same functions run uncompiled in the router and in engines, so
they cannot be decorated; they are cloned instead, with compiled clones in place of the functions
that they call. And importing numba takes half a second of CPU, of which cached code needs nothing:
the cache holds object files, which LLVM's loader links into the process. Its folder is named
by a hash of all sources involved, so all checkouts and installations of one version share the code.
"""

import ctypes
import dis
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

from numpy.typing import NDArray

Function = Callable[..., Any]
BuildReplacements = Callable[[], Mapping[Function, Any]]
"""Gives, for some of the functions that a compiled one calls, others in their place: compiled or
plain. Called only to compile, since intrinsics of numba need numba."""

_C_TYPES: dict[type, type[ctypes.c_int64 | ctypes.c_double]] = {
    int: ctypes.c_int64,
    float: ctypes.c_double,
}
_MAX_VERSIONS = 32
"""Number of folders that stay in the cache, those used last: each belongs to one version of one
function and its sources, of which the tests compile seven."""
_DIGEST_BYTES = 16
_FOLDER = "cleave-simulator"
_COMPILE_TIMEOUT_S = 60.0
"""Longest wait for another process that compiles the same, which takes as long on one core."""
_ENTRY = "cleave_entry"
"""Name of the outermost function in its object file."""


def load_function(
    function: Function, build_replacements: BuildReplacements, *scalars: type
) -> Callable[..., None]:
    """The compiled `function` of one STATE and of `scalars` (int, float); it returns nothing.

    Its machine code comes from the cache, else it is compiled for seconds. All called functions
    must be in numba's subset of Python and take only types that numba supports. The result takes an
    array with one row instead of the STATE.
    """
    target, files = _build_target(), _list_files(function)
    code = next(filter(None, map(_read, files)), b"")
    if not code:
        with _lock_folder(files[-1].parent):
            code = _read(files[-1])
            if not code:
                code = _compile(function, dict(build_replacements()), scalars, target)
                # Another process may delete the folder meanwhile, to make room.
                with suppress(OSError):
                    _write(files[-1], code)
    with suppress(OSError):
        os.utime(files[-1].parent)
    return _link(code, scalars, target)


def _build_target() -> dict[str, str]:
    """The CPU for which numba compiles: this one, or the one that NUMBA_CPU_NAME names."""
    import llvmlite.binding as llvm

    if name := os.environ.get("NUMBA_CPU_NAME"):
        return {"cpu": name, "features": os.environ.get("NUMBA_CPU_FEATURES", "")}
    return {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}


def _compile(
    function: Function,
    clones: dict[Function, Any],
    scalars: tuple[type, ...],
    target: dict[str, str],
) -> bytes:
    """An object file with `function` as _ENTRY. Replaced functions are the keys of `clones`."""
    import llvmlite.binding as llvm
    import numba

    from cleave.simulator.records import STATE

    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def clone(inner: Function, *signature: object) -> Any:  # noqa: ANN401
        assert isinstance(inner, FunctionType)
        names = dict(inner.__globals__)
        for name in _find_globals(inner):
            called = names.get(name)
            if isinstance(called, FunctionType) and called.__module__.startswith("cleave."):
                replacement = clones.get(called, called)
                if isinstance(replacement, FunctionType):
                    clones[called] = clones[replacement] = clone(replacement)
                names[name] = clones[called]
        copy = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__)
        copy.__module__ = inner.__module__
        copy.__qualname__ = inner.__qualname__
        # Compiled code allocates nothing, so reference counting is not needed.
        return numba.njit(*signature, _nrt=False, **options)(copy)

    numbers = {int: numba.types.int64, float: numba.types.float64}
    parameters = (numba.from_dtype(STATE), *(numbers[each] for each in scalars))
    (text,) = clone(function, numba.types.void(*parameters)).inspect_llvm().values()
    module = llvm.parse_assembly(text)
    external = llvm.Linkage.external
    (entry,) = (
        each for each in module.functions if each.linkage is external and not each.is_declaration
    )
    entry.name = _ENTRY
    code: bytes = _build_machine(target).emit_object(module)
    return code


def _build_machine(target: dict[str, str]) -> Any:  # noqa: ANN401
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(**target, opt=3, jit=True)


def _link(code: bytes, scalars: tuple[type, ...], target: dict[str, str]) -> Callable[..., None]:
    """The function _ENTRY of an object file, in the memory of this process."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _build_machine(target))
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    # Numba's calling convention: status f(*result, *exception, arguments), and a record by address.
    pointer, numbers = ctypes.c_void_p, (_C_TYPES[each] for each in scalars)
    convention = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, pointer, *numbers)
    entry = convention(engine.get_function_address(_ENTRY))
    outputs = ctypes.byref(ctypes.c_void_p()), ctypes.byref(ctypes.c_void_p())

    def call(state: NDArray[Any], *values: float) -> None:
        # The engine owns the code's memory, and this function the engine.
        assert engine
        status = entry(*outputs, state.ctypes.data, *values)
        if status:
            raise SystemError(f"the compiled code ended with status {status}")

    return call


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """While one process compiles, others that need the same code wait for it. The lock ends with
    its process."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        deadline_s = time.monotonic() + _COMPILE_TIMEOUT_S
        while not _try_lock(descriptor) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a folder; also True where its file system has no such locks: both compile then."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _read(file: Path) -> bytes:
    """The machine code in a file; empty if there is none, or if it is damaged: LLVM would end this
    process."""
    try:
        content = file.read_bytes()
    except OSError:
        return b""
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if digest == _compute_digest(code) else b""


def _write(file: Path, code: bytes) -> None:
    """Write the file at once, after a digest of the code: other processes may read it."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
        new.write(_compute_digest(code) + code)
    # Only its owner may read a temporary file; an image's code is built as root and read by others.
    Path(new.name).chmod(0o644)
    Path(new.name).rename(file)


def _compute_digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()


@functools.cache
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
    """Whether there is machine code for exactly these sources and this CPU; imports no numba."""
    return any(map(_read, _list_files(function)))


def _list_files(function: Function) -> tuple[Path, Path]:
    """Where the machine code may lie: what an image ships, and the writable cache."""
    target_id = hashlib.blake2b(repr(_build_target()).encode(), digest_size=4).hexdigest()
    file_name = f"{function.__name__}-{target_id}.o"
    digest = hashlib.blake2b(f"{version('numba')} {sys.version_info}".encode(), digest_size=8)
    for file in find_sources(function):
        digest.update(file.read_bytes())
    name = digest.hexdigest()
    return Path(sys.prefix) / "share" / _FOLDER / name / file_name, _find_cache(name) / file_name


def _find_cache(name: str) -> Path:
    """A writable cache folder: in the user's cache, else a private folder for temporary files."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(given or home) / _FOLDER
    folder = cache / name
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _prune_cache(cache)
    except OSError:
        return _create_private_folder(name)
    return folder if os.access(folder, os.W_OK) else _create_private_folder(name)


def _prune_cache(cache: Path) -> None:
    """Delete all folders but those used last; each takes up to a MB."""
    versions = sorted(cache.iterdir(), key=_read_last_use)
    for folder in versions[:-_MAX_VERSIONS]:
        shutil.rmtree(folder, ignore_errors=True)


def _read_last_use(folder: Path) -> float:
    """0: another process has deleted the folder."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _create_private_folder(name: str) -> Path:
    """A folder for temporary files that only this user can access."""
    folder = Path(tempfile.gettempdir()) / f"cleave-simulator-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            (folder / name).mkdir(exist_ok=True)
            return folder / name
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cleave-simulator-"))
