"""The installed distribution of this package: version, extras, and how to install extras.

The distribution and the package have different names. Used to show the version and to report
missing extras; requirements come from the installed metadata, so only pyproject.toml lists them.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.metadata import version as installed_version
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "cleave-serving"

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*;.*\bextra == ['\"]([\w-]+)['\"]")


class MissingExtraError(Exception):
    """Extras are missing or incomplete; the message has the command that installs them."""

    def __init__(self, extras: Sequence[str]) -> None:
        """`extras`: at least one."""
        self.extras = extras
        noun = "extra" if len(extras) == 1 else "extras"
        names = " and ".join(f'"{extra}"' for extra in extras)
        super().__init__(f"needs the {noun} {names}: {build_install_command(extras)}")


@cache
def get_version() -> str:
    """The version of Cleave, e.g. 0.1.0. Reading it takes a millisecond."""
    return installed_version(NAME)


def build_install_command(extras: Iterable[str]) -> str:
    """The command that installs `extras` into this environment."""
    if is_checkout():
        return "make setup"
    folder = _find_editable_sources()
    names = f"[{','.join(extras)}]"
    return f"pip install -e '{folder}{names}'" if folder else f"pip install '{NAME}{names}'"


def is_checkout() -> bool:
    """Whether this is the environment that `make setup` creates in a checkout; it has no pip."""
    folder = _find_editable_sources()
    return folder is not None and Path(sys.prefix).resolve() == (folder / ".venv").resolve()


def _find_editable_sources() -> Path | None:
    """The source folder of an editable installation, else None."""
    origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def require(*extras: str) -> None:
    """Raise MissingExtraError unless all of `extras` are installed."""
    if absent := find_missing_extras(extras):
        raise MissingExtraError(absent)


def find_missing_extras(extras: Iterable[str]) -> list[str]:
    """Those of `extras` with a requirement that is not installed."""
    return [extra for extra in extras if not all(map(_is_installed, _read_extras()[extra]))]


def find_extras_with(module: str) -> list[str]:
    """Extras that provide `module` (`a` or `a.b`), the one with the fewest requirements first."""
    name = module.partition(".")[0]
    # opentelemetry.sdk comes with opentelemetry-sdk.
    providers = [
        extra
        for extra, names in _read_extras().items()
        if any(each == name or each.startswith(f"{name}-") for each in names)
    ]
    return sorted(providers, key=lambda extra: (len(_read_extras()[extra]), extra))


@cache
def _read_extras() -> dict[str, list[str]]:
    """Names of required distributions by extra; extras within extras are resolved at build time."""
    extras: dict[str, list[str]] = {}
    for requirement in requires(NAME) or ():
        if match := _REQUIREMENT.match(requirement):
            extras.setdefault(match[2], []).append(match[1])
    return extras


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
