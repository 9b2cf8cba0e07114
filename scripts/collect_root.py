"""Puts together the root folder of a small image, for images/Dockerfile.

`collect_root.py ENVIRONMENT ROOT MODULE...` copies into ROOT: a Python environment, the interpreter
and standard library under it, each shared library that these load, certificates, users and a shell.
Nothing else: no package manager, compiler, test or documentation. It names the Debian packages that
files are from in var/lib/dpkg/status.d, where vulnerability scanners look for them, and copies
their licences. Then it
compiles the standard library, which the official images carry without bytecode, imports each
MODULE inside ROOT, and removes generated code that none of them has loaded.

Runs as root in a builder with binutils. Raises CalledProcessError where an import fails.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

_UNUSED_FOLDERS = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
"""Folders of the standard library that no server imports; bytecode is compiled again."""
_TESTED_PACKAGES = ("numba", "numpy")
"""Packages that carry their tests."""
_GENERATED = ("api", "models")
"""Folders below kubernetes/client with a class for each kind and group, 115 MB with bytecode. The
package loads each when it is first used, and Cleave works on plain manifests."""
_LIST_LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for module in [*sys.modules.values()]:
    print(getattr(module, "__file__", None) or "")
"""
"""For `python -c` with names of modules: imports them and prints the files of all loaded ones."""
_OPENED_BY_NAME = ("libgcc_s.so.1",)
"""Libraries that no file names: glibc opens this one when a thread is cancelled."""
_FILES = ("/etc/group", "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/bin/sh")
"""Scanners read the distribution of packages from os-release."""
_CERTIFICATES = Path("/usr/share/ca-certificates/mozilla")
"""Debian's; /etc/ssl may hold certificates of the building machine's own network."""
_DPKG = Path("/var/lib/dpkg")
_DOCUMENTS = Path("/usr/share/doc")
_MERGED = ("bin", "lib", "lib64", "sbin")
"""Links to folders of /usr."""
_WRITABLE = {"home/cleave": 0o755, "tmp": 0o1777}
_UID = 1000
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def main(environment: Path, root: Path, modules: list[str]) -> None:
    """Fill `root`, then check it."""
    _make_folders(root)
    shutil.copytree(environment, _move(environment, root), symlinks=True, ignore=_ignore_tests)
    _copy_standard_library(Path(sysconfig.get_path("stdlib")), root)
    interpreter = environment / "bin" / "python"
    for link in _follow_links(interpreter.parent / os.readlink(interpreter)):
        _copy(link, root)
    for file in _FILES:
        if Path(file).exists():
            _copy(Path(file), root)
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("".join(each.read_text() for each in sorted(_CERTIFICATES.glob("*.crt"))))
    binaries = list(_find_binaries(root))
    for library in sorted({*_find_libraries(binaries)}):
        if not library.startswith((f"{root}/", f"{environment}/")):
            _copy(Path(library), root)
    _strip(file for file in binaries if not _is_patched(file))
    _name_packages(root, _DPKG, _DOCUMENTS)
    stdlib = sysconfig.get_path("stdlib")
    _run_inside(root, interpreter, "-m", "compileall", "-q", stdlib)
    _remove_unloaded(root, _list_loaded(root, interpreter, modules))
    for module in modules:
        _run_inside(root, interpreter, "-I", "-c", f"import {module}, ssl, sqlite3")


def _make_folders(root: Path) -> None:
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name, mode in _WRITABLE.items():
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
    os.chown(root / "home/cleave", _UID, _UID)


def _copy_standard_library(source: Path, root: Path) -> None:
    def ignore(_folder: str, names: list[str]) -> set[str]:
        unused = {name for name in names if name in _UNUSED_FOLDERS or name.startswith("config-")}
        return unused | {name for name in names if name.endswith((".a", ".exe"))}

    shutil.copytree(source, _move(source, root), symlinks=True, ignore=ignore)


def _ignore_tests(folder: str, names: list[str]) -> set[str]:
    is_tested = any(f"/site-packages/{name}" in folder for name in _TESTED_PACKAGES)
    unused = {name for name in names if name.endswith((".pyi", ".pyx", ".pxd"))}
    return unused | ({"tests"} & {*names} if is_tested else set())


def _follow_links(path: Path) -> Iterator[Path]:
    """A path, what it links to, and so on."""
    yield path
    while path.is_symlink():
        path = path.parent / os.readlink(path)
        yield path


def _copy(path: Path, root: Path) -> None:
    """Copy a file to where its path leads, through links of `root`; a link with its target."""
    for each in _follow_links(path):
        target = _move(each, root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink() and not target.exists():
            shutil.copy2(each, target, follow_symlinks=False)


def _move(path: Path, root: Path) -> Path:
    """`path` below `root`; folders of / that are links lead below /usr."""
    resolved = path.parent.resolve() / path.name
    return root / resolved.relative_to("/")


def _find_binaries(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file() and _is_elf(path):
                yield path


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _find_libraries(binaries: Iterable[Path]) -> Iterator[str]:
    """What the loader opens for `binaries`."""
    for binary in binaries:
        # Files that are no programs or libraries of this machine have an error status.
        done = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False)
        yield from _LIBRARY.findall(done.stdout)
    for name in _OPENED_BY_NAME:
        for folder in ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu"):
            if Path(folder, name).exists():
                yield f"{folder}/{name}"


def _name_packages(root: Path, dpkg: Path, documents: Path) -> None:
    """Write the stanza of each Debian package that a file of `root` is from, as distroless images
    have them, and copy its licence; `dpkg`: the builder's /var/lib/dpkg, `documents`: its
    /usr/share/doc."""
    files = {f"/{file.relative_to(root)}" for file in root.rglob("*") if not file.is_dir()}
    stanzas = {
        match[1]: stanza
        for stanza in (dpkg / "status").read_text().split("\n\n")
        if (match := re.match(r"Package: (\S+)", stanza.lstrip()))
    }
    target = root / "var/lib/dpkg/status.d"
    target.mkdir(parents=True)
    for listing in (dpkg / "info").glob("*.list"):
        # The database has names from before /lib became a link to /usr/lib.
        owned = {
            re.sub(r"^/(bin|lib|lib64|sbin)/", r"/usr/\1/", path)
            for path in listing.read_text().split("\n")
        }
        package = listing.stem.partition(":")[0]
        if package in stanzas and (owned & files or package == "ca-certificates"):
            (target / package).write_text(stanzas[package].strip() + "\n")
            license_file = documents / package / "copyright"
            if license_file.exists():
                _copy(license_file, root)


def _is_patched(file: Path) -> bool:
    """Whether a wheel's builder has changed the file's layout, which `strip` would break."""
    packages = next((each for each in file.parents if each.name == "site-packages"), None)
    if packages is None:
        return False
    package = file.relative_to(packages).parts[0]
    return package.endswith(".libs") or (packages / f"{package}.libs").exists()


def _strip(files: Iterable[Path]) -> None:
    """Remove symbols that only debuggers read."""
    for file in files:
        subprocess.run(["strip", "--strip-unneeded", file], check=True)


def _list_loaded(root: Path, interpreter: Path, modules: list[str]) -> set[Path]:
    """Files inside `root` that all the modules together load."""
    command = ["chroot", root, interpreter, "-I", "-c", _LIST_LOADED, *modules]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {root / line.lstrip("/") for line in done.stdout.split()}


def _remove_unloaded(root: Path, loaded: set[Path]) -> None:
    """Remove generated modules that are not among `loaded`, and their bytecode."""
    for name in _GENERATED:
        for folder in root.rglob(f"site-packages/kubernetes/**/client/{name}"):
            for source in {*folder.glob("*.py")} - loaded - {folder / "__init__.py"}:
                source.unlink()
                for compiled in (folder / "__pycache__").glob(f"{source.stem}.*"):
                    compiled.unlink()


def _run_inside(root: Path, *command: str | Path) -> None:
    subprocess.run(["chroot", root, *command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
