"""Writes what an image is made of and how it was built, for scripts/images.

`describe_image.py ARCHIVE --parameter NAME=VALUE... --began SECONDS` reads an archive that
`docker save` or `buildah push` wrote and writes two files beside it: `.cdx.json`, a bill of
materials (CycloneDX) with each Python distribution and Debian package in its layers, and
`.provenance.json`, an in-toto statement with SLSA's provenance. What is hard: small images have no
package manager; there, scripts/collect_root.py has left a stanza in /var/lib/dpkg/status.d for each
package that a file is from.
"""

import argparse
import hashlib
import json
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_ROOT = Path(__file__).parent.parent
_BUILD_TYPE = "https://cleave.dev/scripts/images/v1"
_INPUTS = ("images/Dockerfile", "images/uv.txt", "uv.lock")
"""Files that decide what is downloaded; the commit has all others."""
_METADATA = re.compile(r"(?:^|/)[^/]+\.dist-info/METADATA$")
_PACKAGES = re.compile(r"^var/lib/dpkg/(?:status|status\.d/[^/]+)$")
_RELEASE = re.compile(r"^usr/lib/os-release$")
_ENVIRONMENT = re.compile(r"(?:^|/)pyvenv\.cfg$")
_REMOVED = ".wh."
"""Prefix of a file that says that a layer removes the one of the remaining name."""


def main() -> None:
    """Describe one archive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--parameter", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--began", type=float, required=True, help="seconds since the epoch")
    args = parser.parse_args()
    parameters = dict(each.split("=", 1) for each in args.parameter)
    image_id, files = read_image(args.archive)
    subject = Component(
        name=parameters["image"],
        version=parameters["version"],
        type=ComponentType.CONTAINER,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image_id)],
    )
    bom = build_bom(subject, files)
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    args.archive.with_suffix(".cdx.json").write_text(text + "\n")
    statement = build_provenance(image_id, parameters, began_s=args.began, finished_s=time.time())
    text = json.dumps(statement, indent=1)
    args.archive.with_suffix(".provenance.json").write_text(text + "\n")
    print(f"{args.archive.stem}: {len(bom.components)} components")  # noqa: T201


def read_image(archive: Path) -> tuple[str, dict[str, str]]:
    """The image's id (SHA-256 of its config), and the files that name what it holds, by path."""
    files: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        (image,) = json.load(_extract(tar, "manifest.json"))
        image_id = hashlib.sha256(_extract(tar, image["Config"]).read()).hexdigest()
        for layer in image["Layers"]:
            with tarfile.open(fileobj=_extract(tar, layer)) as content:
                for path, text in _read_layer(content, files):
                    files[path] = text
    return image_id, files


def _extract(tar: tarfile.TarFile, name: str) -> Any:  # noqa: ANN401 - tarfile's own type
    found = tar.extractfile(name)
    if found is None:
        raise ValueError(f"{tar.name}: {name} is no file")
    return found


def _read_layer(layer: tarfile.TarFile, below: dict[str, str]) -> Iterator[tuple[str, str]]:
    for member in layer:
        path = member.name.removeprefix("./")
        folder, _, name = path.rpartition("/")
        if name.startswith(_REMOVED):
            removed = f"{folder}/{name.removeprefix(_REMOVED)}".lstrip("/")
            for each in [p for p in below if p == removed or p.startswith(f"{removed}/")]:
                del below[each]
        elif member.isfile() and any(
            each.search(path) for each in (_METADATA, _PACKAGES, _RELEASE, _ENVIRONMENT)
        ):
            yield path, _extract(layer, member.name).read().decode(errors="replace")


def build_bom(subject: Component, files: Mapping[str, str]) -> Bom:
    """The bill of materials of an image with `files`."""
    bom = Bom()
    bom.metadata.component = subject
    components = [*_list_distributions(files), *_list_packages(files), *_list_pythons(files)]
    for component in components:
        bom.components.add(component)
    bom.register_dependency(subject, components)
    return bom


def _list_distributions(files: Mapping[str, str]) -> Iterator[Component]:
    licenses = LicenseFactory()
    for path in filter(_METADATA.search, sorted(files)):
        fields = HeaderParser().parsestr(files[path])
        name = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
        license_text = fields["License-Expression"]
        purl = PackageURL("pypi", None, name, fields["Version"])
        yield Component(
            name=name,
            version=fields["Version"],
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=f"{purl}#{path}",
            licenses=[licenses.make_from_string(license_text)] if license_text else [],
        )


def _list_packages(files: Mapping[str, str]) -> Iterator[Component]:
    release = next((files[path] for path in filter(_RELEASE.match, files)), "")
    version = re.search(r'(?m)^VERSION_ID="?([\d.]+)', release)
    distribution = {"distro": f"debian-{version[1]}"} if version else {}
    stanzas = [
        stanza
        for path in filter(_PACKAGES.match, sorted(files))
        for stanza in re.split(r"\n\n+", files[path].strip())
    ]
    for stanza in stanzas:
        fields = HeaderParser().parsestr(stanza)
        if " installed" not in fields.get("Status", "install ok installed"):
            continue
        qualifiers = {"arch": fields["Architecture"], **distribution}
        purl = PackageURL("deb", "debian", fields["Package"], fields["Version"], qualifiers)
        yield Component(
            name=fields["Package"],
            version=fields["Version"],
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=str(purl),
        )


def _list_pythons(files: Mapping[str, str]) -> Iterator[Component]:
    """The interpreter, which Docker's official image compiles itself."""
    for path in filter(_ENVIRONMENT.search, sorted(files)):
        if found := re.search(r"(?m)^version(?:_info)? = (\d+\.\d+\.\d+)", files[path]):
            purl = PackageURL("generic", None, "python", found[1])
            yield Component(
                name="python", version=found[1], type=ComponentType.PLATFORM, purl=purl,
                bom_ref=f"{purl}#{path}",
            )  # fmt: skip


def build_provenance(
    image_id: str, parameters: Mapping[str, str], *, began_s: float, finished_s: float
) -> dict[str, Any]:
    """The statement that an image was built from this commit with these parameters. Unsigned: a
    release signs one of its own (.github/workflows/release.yml)."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": parameters["image"], "digest": {"sha256": image_id}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": dict(parameters),
                "resolvedDependencies": list(_list_dependencies(parameters["base"])),
            },
            "runDetails": {
                "builder": {"id": _BUILD_TYPE},
                "metadata": {
                    "startedOn": _format_time(began_s),
                    "finishedOn": _format_time(finished_s),
                },
            },
        },
    }


def _list_dependencies(base: str) -> Iterator[dict[str, Any]]:
    commit = _run_git("rev-parse", "HEAD")
    if commit:
        changed = _run_git("status", "--porcelain", "--untracked-files=no")
        state = {"annotations": {"changed": changed.splitlines()}} if changed else {}
        yield {"uri": "git+cleave", "digest": {"gitCommit": commit}, **state}
    name, _, digest = base.partition("@sha256:")
    yield {"uri": f"pkg:docker/{name}", **({"digest": {"sha256": digest}} if digest else {})}
    for path in _INPUTS:
        digest = hashlib.sha256((_ROOT / path).read_bytes()).hexdigest()
        yield {"uri": f"file:{path}", "digest": {"sha256": digest}}


def _run_git(*args: str) -> str:
    """What git prints; empty where the sources are no repository."""
    done = subprocess.run(["git", "-C", _ROOT, *args], capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else ""


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


if __name__ == "__main__":
    main()
