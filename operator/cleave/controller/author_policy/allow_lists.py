"""What the chart's `policy.allow` adds to Cleave's own pods with the profile Restricted."""

import json
from collections.abc import Mapping

from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.controller.author_policy.pod_table import FIELDS
from cleave.controller.author_policy.volume_table import VOLUMES
from cleave.manifests.container import IMAGE_KINDS, Images

NAMES = (
    "args", "configMaps", "env", "fields", "folders", "images", "labels", "priorityClasses",
    "resources", "secrets", "volumes",
)  # fmt: skip
"""The lists."""
_CHOICES = {"fields": FIELDS, "volumes": VOLUMES}
_ALL = "*"


class AllowListsError(ValueError):
    """The text is no object of lists; names the fault."""


def parse(text: str) -> AllowLists:
    """Read the lists from JSON, as the chart has them. Raises AllowListsError."""
    try:
        lists = json.loads(text)
    except ValueError as error:
        raise AllowListsError(f"no JSON: {error}") from None
    if not isinstance(lists, Mapping):
        raise AllowListsError("must be an object of lists")
    return {str(name): _check(str(name), entries) for name, entries in lists.items()}


def _check(name: str, entries: object) -> tuple[str, ...]:
    if name not in NAMES:
        raise AllowListsError(f"{name}: there is no such list; there are {', '.join(NAMES)}")
    if not (isinstance(entries, list) and all(isinstance(each, str) for each in entries)):
        raise AllowListsError(f"{name}: must be a list of texts")
    for entry in entries:
        if _ALL in entry[:-1] or not entry:
            raise AllowListsError(f"{name}: {entry!r}: * stands at the end only")
        known = _CHOICES.get(name, (entry,))
        if entry != _ALL and entry not in known:
            raise AllowListsError(f"{name}: {entry!r}: must be one of {', '.join(known)}")
        if name == "folders" and not (entry.startswith("/") and _ALL not in entry):
            raise AllowListsError(f"folders: {entry!r}: must be an absolute path without *")
    return tuple(each.rstrip("/") if name == "folders" else each for each in entries)


def add_own_images(lists: AllowLists, images: Images) -> AllowLists:
    """The lists with Cleave's own images, of any version: during an upgrade operators of two
    versions may create pods."""
    names = {_remove_version(images.get(kind)) for kind in IMAGE_KINDS}
    own = [f"{name}{sign}*" for name in sorted(names) for sign in ":@"]
    return {**lists, "images": (*lists.get("images", ()), *own)}


def _remove_version(reference: str) -> str:
    """An image's name without digest and tag; a colon before a slash is that of a port."""
    name = reference.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name
