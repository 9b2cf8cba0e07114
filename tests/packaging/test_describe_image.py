"""Bills of materials and provenance, made from archives as builders write them."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = "opt/cleave/lib/python3.11/site-packages"
METADATA = "Metadata-Version: 2.4\nName: {}\nVersion: {}\nLicense-Expression: MIT\n\nText.\n"
STANZA = "Package: {}\nStatus: {}\nArchitecture: amd64\nVersion: {}\n"
BASE = f"docker.io/library/python:3.11@sha256:{'a' * 64}"


def make_layer(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def make_archive(path: Path, *layers: dict[str, str]) -> str:
    """Write an archive as `docker save` does; the image's id."""
    config = json.dumps({"architecture": "amd64"}).encode()
    parts = {f"layer{number}.tar": make_layer(files) for number, files in enumerate(layers)}
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": list(parts)}]
    parts |= {"config.json": config, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as tar:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(config).hexdigest()


def describe(archive: Path) -> subprocess.CompletedProcess[str]:
    parameters = {"image": "cleave-operator:0.1.0", "version": "0.1.0", "base": BASE}
    flags = [f"--parameter={name}={value}" for name, value in parameters.items()]
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "describe_image.py", archive, *flags, "--began=100"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def described(tmp_path: Path) -> tuple[str, dict, dict]:
    """The id of an image of two layers, its bill of materials and its provenance."""
    archive = tmp_path / "image.tar"
    first = {
        f"{PACKAGES}/Old_Name-1.0.dist-info/METADATA": METADATA.format("Old_Name", "1.0"),
        f"{PACKAGES}/kept-2.0.dist-info/METADATA": METADATA.format("Kept.Name", "2.0"),
        f"{PACKAGES}/kept-2.0.dist-info/RECORD": "kept,,",
        "var/lib/dpkg/status": "\n\n".join(
            STANZA.format(name, f"install ok {state}", "12-3")
            for name, state in (("libc6", "installed"), ("gone", "config-files"))
        ),
    }
    second = {
        f"{PACKAGES}/.wh.Old_Name-1.0.dist-info": "",
        "./var/lib/dpkg/status.d/zlib1g": STANZA.format("zlib1g", "install ok installed", "1:1.2"),
        "usr/lib/os-release": 'NAME="Debian"\nVERSION_ID="12"\n',
        "opt/cleave/pyvenv.cfg": "home = /usr/local/bin\nversion_info = 3.11.14\n",
    }
    image_id = make_archive(archive, first, second)
    done = describe(archive)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    bom, provenance = (
        json.loads(archive.with_suffix(suffix).read_text())
        for suffix in (".cdx.json", ".provenance.json")
    )
    return image_id, bom, provenance


def test_a_bill_names_what_the_last_layer_leaves(described) -> None:
    image_id, bom, _ = described
    assert {each["purl"] for each in bom["components"]} == {
        "pkg:pypi/kept-name@2.0",
        "pkg:deb/debian/libc6@12-3?arch=amd64&distro=debian-12",
        "pkg:deb/debian/zlib1g@1:1.2?arch=amd64&distro=debian-12",
        "pkg:generic/python@3.11.14",
    }
    subject = bom["metadata"]["component"]
    assert subject["hashes"] == [{"alg": "SHA-256", "content": image_id}]
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")


def test_provenance_names_the_image_its_commit_and_what_it_was_made_from(described) -> None:
    image_id, _, statement = described
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": "cleave-operator:0.1.0", "digest": {"sha256": image_id}}
    ]
    build = statement["predicate"]["buildDefinition"]
    digests = {each["uri"]: each.get("digest") for each in build["resolvedDependencies"]}
    assert digests["pkg:docker/docker.io/library/python:3.11"] == {"sha256": "a" * 64}
    lock = hashlib.sha256((ROOT / "uv.lock").read_bytes()).hexdigest()
    assert digests["file:uv.lock"] == {"sha256": lock}
    if (ROOT / ".git").exists():
        assert len(digests["git+cleave"]["gitCommit"]) == 40
    times = statement["predicate"]["runDetails"]["metadata"]
    assert times["startedOn"] == "1970-01-01T00:01:40Z" < times["finishedOn"]
