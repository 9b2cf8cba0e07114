"""Writes plain manifests from the chart, for scripts/generate.

`python scripts/manifests.py OUTDIR` gives the CRDs in OUTDIR/crds the annotations that the chart
needs, and writes OUTDIR/manifests/cleave.yaml for `kubectl apply`. It is rendered by helm; without
helm the existing file is kept if it was rendered from the current chart.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_CHART = _ROOT / "charts" / "cleave"
_CRDS = "files/crds"
_NAMESPACE = "cleave-system"
_KUBERNETES = "1.30.0"
_ANNOTATIONS = """
  annotations:
    helm.sh/resource-policy: keep
    cleave.dev/release: "{}"
"""
"""What keeps a CRD when the release is uninstalled, and what templates/crdpolicy.yaml compares."""
_HELMS_LABELS = re.compile(r"(?m)^ *(app\.kubernetes\.io/managed-by: Helm|helm\.sh/chart: .*)\n")
_TITLE = "# Rendered from charts/cleave by scripts/generate; changes here are lost.\n"


def main(argv: Sequence[str]) -> int:
    """Write everything below argv[0]; 1 when helm would be needed, 2 on bad usage."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        sys.stderr.write("usage: python scripts/manifests.py OUTDIR\n")
        return 2
    out = Path(argv[0])
    (out / "manifests").mkdir(exist_ok=True)
    for path in (out / "crds").glob("*.yaml"):
        path.write_text(_with_annotations(path.read_text()))
    return _write_rest(out / "manifests" / "cleave.yaml")


def find_helm() -> str | None:
    """Path of helm: $HELM, the one on PATH, or the one that scripts/cluster-tools built."""
    if found := os.environ.get("HELM") or shutil.which("helm"):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleave-e2e"
    built = sorted(cache.glob("*/helm"), key=lambda path: path.stat().st_mtime)
    return str(built[-1]) if built else None


def render(helm: str) -> str:
    """The chart without its CRDs, with its default values, preceded by its namespace."""
    rendered = subprocess.run(
        [
            *(helm, "template", "cleave", str(_CHART)),
            *("--namespace", _NAMESPACE, "--set", "crds.enabled=false", "--no-hooks"),
            # The default version differs between helm releases and may be older than allowed.
            *("--kube-version", _KUBERNETES),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    # kubectl manages these objects.
    rendered = _HELMS_LABELS.sub("", rendered)
    # Empty lines differ between helm versions.
    objects = re.sub(r"\n+---\n", "\n---\n", re.sub(r"(?m)^# Source: .*\n", "", rendered)).strip()
    return f"{_TITLE}{_stamp()}\n---\n{_namespace()}{objects}\n"


def _write_rest(target: Path) -> int:
    present = _ROOT / "manifests" / "cleave.yaml"
    if helm := find_helm():
        target.write_text(render(helm))
        return 0
    text = present.read_text() if present.exists() else ""
    if _stamp() in text:
        target.write_text(text)
        return 0
    sys.stderr.write(
        "manifests/cleave.yaml is stale and helm is needed to render it: set HELM, or let "
        "scripts/cluster-tools build it\n"
    )
    return 1


def _with_annotations(definition: str) -> str:
    """The CRD with the annotations that the chart needs."""
    annotations = _ANNOTATIONS.format(number_version(read_version())).rstrip("\n")
    return re.sub(
        r"(?m)^metadata:\n  name: \S+$", lambda found: found[0] + annotations, definition, count=1
    )


def read_version() -> str:
    """The version of this checkout."""
    project: dict[str, str] = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return project["version"]


def number_version(version: str) -> int:
    """`1.2.3` -> 1002003: numbers in the order of releases."""
    major, minor, patch = (int(part) for part in re.findall(r"\d+", version)[:3])
    return (major * 1_000 + minor) * 1_000 + patch


def _stamp() -> str:
    """A comment with the digest of the chart, without its CRDs, which need no helm."""
    digest = hashlib.sha256()
    for path in sorted(_CHART.rglob("*")):
        name = path.relative_to(_CHART).as_posix()
        if path.is_file() and not name.startswith(_CRDS):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"# Chart: {digest.hexdigest()[:16]}"


def _namespace() -> str:
    return (
        "apiVersion: v1\n"
        "kind: Namespace\n"
        "metadata:\n"
        f"  name: {_NAMESPACE}\n"
        "  labels:\n"
        "    pod-security.kubernetes.io/enforce: restricted\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
