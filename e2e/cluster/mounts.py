"""The step before a pod's command: a file system of its own, with the pod's volumes in it.

Run as a script, with the standard library alone, by the launcher of `cleave.local.kubelet.process`.
Only mount points are the pod's own; everything else is this machine's. What is hard: a volume may
hide what the command needs (one on /tmp, when this repository is below it), and may be mounted
where nothing exists, which must not leave folders on the machine. So sources are opened before
anything is mounted, what is needed is bound back, and missing folders are made in a memory file
system that takes the place of their parent.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: str, argv: list[str]) -> None:
    """Mount what `plan` says and become `argv`.

    `plan` is JSON: `volumes`, a list of {source, target, readOnly} where no source means memory,
    `keep`, paths that must stay reachable, and `readOnlyRoot`.
    """
    mounts = json.loads(plan)
    volumes = sorted(mounts["volumes"], key=lambda volume: volume["target"])
    if _libc.unshare(_CLONE_NEWNS) != 0:
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    sources = [_opened(volume["source"]) for volume in volumes]
    opened = {path: _opened(path) for path in mounts["keep"]}
    for volume, source in zip(volumes, sources, strict=True):
        target = volume["target"]
        _exist(target, is_folder=source is None or _is_folder(source))
        if source is None:
            _mount("tmpfs", target, "tmpfs", 0)
        else:
            _bind(source, target, read_only=volume["readOnly"])
        if not volume["readOnly"]:
            _own.add(Path(target))
        for path, folder in opened.items():
            if folder is not None and Path(path).is_relative_to(target):
                _exist(path, is_folder=True)
                _bind(folder, path)
    if mounts["readOnlyRoot"]:
        _mount(None, "/", None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
    os.execvp(argv[0], argv)


def _opened(path: str | None) -> int | None:
    return None if path is None else os.open(path, os.O_PATH)


def _is_folder(source: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{source}")


def _exist(target: str, *, is_folder: bool) -> None:
    """See that there is a mount point at `target`."""
    path = Path(os.path.realpath(target))
    if path.exists():
        return
    parent = next(folder for folder in path.parents if folder.exists())
    if parent == Path("/"):
        sys.exit(f"mount path {target}: its first folder does not exist on this machine")
    if _own.isdisjoint([parent, *parent.parents]):
        _replace_by_memory(parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if is_folder else path.touch()


_own: set[Path] = set()
"""Folders that are the pod's alone: what is made below them leaves no trace on the machine."""


def _replace_by_memory(folder: Path) -> None:
    """Put a memory file system over `folder` that shows the same entries."""
    entries = [(entry, os.open(entry, os.O_PATH | os.O_NOFOLLOW)) for entry in folder.iterdir()]
    _mount("tmpfs", str(folder), "tmpfs", 0)
    _own.add(folder)
    for entry, source in entries:
        if link := _link(source):
            entry.symlink_to(link)
            continue
        entry.mkdir() if _is_folder(source) else entry.touch()
        _bind(source, str(entry))


def _link(source: int) -> str:
    """Where the symbolic link that `source` is leads; nothing when it is none."""
    try:
        return os.readlink("", dir_fd=source)
    except OSError:
        return ""


def _bind(source: int, target: str, *, read_only: bool = False) -> None:
    _mount(f"/proc/self/fd/{source}", target, None, _MS_BIND | _MS_REC)
    if read_only:
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = (text.encode() if text is not None else None for text in (source, target, kind))
    if _libc.mount(*encoded, ctypes.c_ulong(flags), None) != 0:
        sys.exit(f"mount {target}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
