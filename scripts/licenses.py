"""Writes THIRD_PARTY.md: licences of the Python packages in images, for scripts/generate.

`python scripts/licenses.py FILE` reads which packages an image has from images/Dockerfile and
uv.lock, through `uv export`. A licence is what the package's metadata say: of the installed
package, else as THIRD_PARTY.md has it for the same version, else as the index has it.
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FILE = _ROOT / "THIRD_PARTY.md"
_IMAGES = {
    "operator": "o", "gateway": "g", "worker-emulated": "e", "worker-cpu": "c", "worker-cuda": "n",
}  # fmt: skip
_SYNC = (
    r"FROM build AS build-{image}\n(?:.*\n)*?.*--no-editable --reinstall-package \S+(?P<flags>.*)\n"
)
_TIMEOUT_S = 30
_TEXT = """\
<!-- Generated from uv.lock and metadata of packages by scripts/generate; changes are lost. -->
# Packages of others in Cleave's images

Cleave is under the Apache License 2.0 ([LICENSE](LICENSE), [NOTICE](NOTICE)). Its images also hold
these {count} Python packages, each under the licence of its makers, with its text in
`/opt/cleave/lib/python3.11/site-packages/NAME-VERSION.dist-info`. Python (PSF-2.0) and Debian's
packages have theirs in `/usr/local/lib/python3.11/LICENSE.txt` and `/usr/share/doc`; bills of
materials name all with their versions ([docs/supply-chain.md](docs/supply-chain.md)). The wheel
`cleave-serving` holds none of them. Images: {legend}.
"""
_SECTIONS = (
    (
        "Under terms of their makers, not open source",
        re.compile(r"proprietary|nvidia|intel|eula", re.IGNORECASE),
    ),
    ("Under the LGPL, the GPL or the MPL", re.compile(r"GPL|MPL")),
    ("Under permissive licences", re.compile("")),
)
_NAMES = {
    "0BSD": "0BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Other/Proprietary License": "proprietary",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Of classifiers and free text, as SPDX where it has an identifier."""

_VAGUE = ([], ["BSD License"], ["Other/Proprietary License"])
"""Classifiers that say less than the field License."""
_UNNAMED = "see its dist-info"
_SIGNS = {
    "Apache License Version 2.0": "Apache-2.0",
    "Permission is hereby granted, free of charge, to any person": "MIT",
    "Neither the name of": "BSD-3-Clause",
}
"""Parts of the texts of licences."""

Package = tuple[str, str]
"""Name and version."""


def main(argv: Sequence[str]) -> int:
    """Write the file argv[0]; 2 on bad usage."""
    if len(argv) != 1:
        sys.stderr.write("usage: python scripts/licenses.py FILE\n")
        return 2
    images: dict[Package, str] = defaultdict(str)
    for image, letter in _IMAGES.items():
        for package in list_packages(image):
            images[package] += letter
    known = read_licenses(_FILE.read_text()) if _FILE.exists() else {}
    licenses = {each: find_license(each, known) for each in images}
    Path(argv[0]).write_text(build_text(images, licenses))
    return 0


def list_packages(image: str) -> Iterator[Package]:
    """Yield what `uv sync` installs into an image, by its line in the Dockerfile."""
    dockerfile = (_ROOT / "images" / "Dockerfile").read_text()
    found = re.search(_SYNC.format(image=image), dockerfile)
    if found is None:
        raise ValueError(f"images/Dockerfile has no stage build-{image} with uv sync")
    flags = found["flags"].split()
    left_out = {flags[at + 1] for at, flag in enumerate(flags) if flag == "--no-install-package"}
    command = ["uv", "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project"]
    command += ["--no-hashes", "--no-annotate", "--no-header"]
    command += [flag for flag in flags if flag != "--no-install-package" and flag not in left_out]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name, _, version = line.partition(" ;")[0].strip().partition("==")
        if name not in left_out:
            yield name, version


def find_license(package: Package, known: Mapping[Package, str]) -> str:
    """The licence of a package. Raises OSError when only the index has it and cannot be reached."""
    name, version = package
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or found.version != version:
        return known.get(package) or name_license(_fetch_metadata(package))
    named = name_license(Parser().parsestr(found.read_text("METADATA") or ""))
    return _recognize(found) or named if named == _UNNAMED else named


def name_license(fields: Message) -> str:
    """The licence that a package's metadata state."""
    if expression := fields["License-Expression"]:
        return str(expression)
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in fields.get_all("Classifier", ())
        if each.startswith("License ::") and not each.endswith(("OSI Approved", "DFSG approved"))
    ]
    text = (fields["License"] or "").strip().partition("\n")[0]
    # An own expression says more than `BSD License`, a whole text less.
    is_name = text and len(text) <= 60 and not text.startswith("Copyright")
    if is_name and (classifiers in _VAGUE or "NVIDIA" in text):
        return _NAMES.get(text, text)
    return " AND ".join(_NAMES.get(each, each) for each in classifiers) or _UNNAMED


def _recognize(found: metadata.Distribution) -> str:
    """The licence whose text a package holds; empty: another one."""
    own = re.compile(r"[^/]+\.dist-info/(licenses/)?LICENSE[^/]*")
    files = [each for each in found.files or () if own.fullmatch(str(each))]
    text = " ".join("".join(each.read_text() for each in files).split())
    return next((name for sign, name in _SIGNS.items() if sign in text), "")


def _fetch_metadata(package: Package) -> Message:
    """What PyPI says of a package, in its latest version: mirrors have no page of others."""
    url = f"https://pypi.org/pypi/{package[0]}/json"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        info = json.load(response)["info"]
    fields = Message()
    for name, key in (("License-Expression", "license_expression"), ("License", "license")):
        if value := info.get(key):
            # Of a whole text the first line says which it is.
            fields[name] = value.strip().partition("\n")[0]
    for each in info["classifiers"]:
        fields["Classifier"] = each
    return fields


def build_text(images: Mapping[Package, str], licenses: Mapping[Package, str]) -> str:
    """The file, with a table for each section."""
    legend = ", ".join(f"{letter} {image}" for image, letter in _IMAGES.items())
    text = _TEXT.format(count=len(images), legend=legend)
    left = sorted(images)
    for title, pattern in _SECTIONS:
        part = [each for each in left if pattern.search(licenses[each])]
        left = [each for each in left if each not in part]
        rows = [f"| {name} | {v} | {licenses[name, v]} | {images[name, v]} |" for name, v in part]
        text += "\n".join(
            [
                "",
                f"## {title}",
                "",
                "| package | version | licence | in |",
                "|---|---|---|---|",
                *rows,
                "",
            ]
        )
    return text


def read_licenses(text: str) -> dict[Package, str]:
    """The licences that a written file has."""
    rows = re.findall(r"^\| (\S+) \| (\S*\d\S*) \| (.+) \| [a-z]+ \|$", text, re.MULTILINE)
    return {(name, version): license_ for name, version, license_ in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
