"""Finds the commit of a model's branch or tag: on Hugging Face or a mirror, else in its cache.

Called by `loaded_weights` in a thread. The environment decides as it does for vLLM: HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE, HF_HOME.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger(__name__)
TIMEOUT_S = 10.0
"""Limit of one read from the hub."""
DEFAULT_REVISION = "main"
_COMMIT = re.compile("[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")
_TRUE = ("1", "ON", "YES", "TRUE")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_repository(name: str) -> bool:
    """Return whether this can be the name of a repository."""
    return bool(_REPOSITORY.fullmatch(name)) and ".." not in name


def is_commit(revision: str) -> bool:
    """Return whether a revision is a whole commit, which cannot move."""
    return bool(_COMMIT.fullmatch(revision))


def is_offline(env: Mapping[str, str]) -> bool:
    """Return whether the environment forbids to read from the hub."""
    return any(env.get(name, "").upper() in _TRUE for name in _OFFLINE)


def find_commit(name: str, revision: str, cache: Path, *, offline: bool) -> str:
    """Return the commit that a revision of a repository names now; empty: neither the hub nor the
    cache says. `cache`: folder of what was downloaded."""
    if is_commit(revision):
        return revision
    return ("" if offline else _fetch_commit(name, revision)) or read_cached(name, revision, cache)


def read_cached(name: str, revision: str, cache: Path) -> str:
    """Return the commit that a revision had when it was downloaded last; empty: it was not."""
    if ".." in revision or not is_repository(name):
        return ""
    try:
        path = cache / f"models--{name.replace('/', '--')}" / "refs" / revision
        commit = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if is_commit(commit) else ""


def find_cache(env: Mapping[str, str]) -> Path:
    """Return the folder in which downloads are kept, as huggingface_hub finds it."""
    if folder := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    base = Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(env.get("HF_HOME") or base / "huggingface").expanduser() / "hub"


def fetch_snapshot(name: str, commit: str, cache: Path) -> Path:
    """Download the files of a commit, unless the cache has them; return their folder. Raises
    OSError or ValueError, as huggingface_hub does, and ImportError where that is not installed."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(name, revision=commit, cache_dir=cache, etag_timeout=TIMEOUT_S)
    return Path(str(folder))


def _fetch_commit(name: str, revision: str) -> str:
    try:
        from huggingface_hub import HfApi

        commit = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_S).sha or ""
    except Exception as error:  # noqa: BLE001 - its errors differ by version
        text = str(error).partition("\n")[0]
        _log.warning("the commit of %s@%s is not read from the hub: %.300s", name, revision, text)
        return ""
    return commit if is_commit(commit) else ""
