"""Writes plain manifests from the chart, for scripts/generate.

`python scripts/manifests.py CRDS OUTDIR`: OUTDIR/crds gets the CRDs of the folder CRDS as the chart
carries them, OUTDIR/manifests what `kubectl apply` takes: crds.yaml and cleave.yaml. The latter is
rendered by helm, which few machines have: without it the present file is kept as long as the chart
is the one that it was rendered from.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_CHART = _ROOT / "charts" / "cleave"
_CRDS = "files/crds"
_NAMESPACE = "cleave-system"
_KUBERNETES = "1.30.0"
_KEEP = "\n  annotations:\n    helm.sh/resource-policy: keep"
_TITLE = "# Rendered from charts/cleave by scripts/generate; changes here are lost.\n"


def main(argv: Sequence[str]) -> int:
    """Write everything below argv[1]; 1 when helm would be needed, 2 on bad usage."""
    if len(argv) != 2 or not all(Path(folder).is_dir() for folder in argv):
        sys.stderr.write("usage: python scripts/manifests.py CRDS OUTDIR\n")
        return 2
    source, out = map(Path, argv)
    (out / "crds").mkdir(exist_ok=True)
    (out / "manifests").mkdir(exist_ok=True)
    definitions = {path.name: _kept(path.read_text()) for path in sorted(source.glob("*.yaml"))}
    for name, text in definitions.items():
        (out / "crds" / name).write_text(text)
    (out / "manifests" / "crds.yaml").write_text("---\n".join(definitions.values()))
    return _write_rest(out / "manifests" / "cleave.yaml")


def find_helm() -> str | None:
    """Path of helm: $HELM, the one on the path, or what scripts/cluster-tools has built."""
    if found := os.environ.get("HELM") or shutil.which("helm"):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleave-e2e"
    built = sorted(cache.glob("*/helm"), key=lambda path: path.stat().st_mtime)
    return str(built[-1]) if built else None


def render(helm: str) -> str:
    """Everything but the CRDs, with the chart's defaults, in a namespace of its own."""
    told = subprocess.run(
        [
            *(helm, "template", "cleave", str(_CHART)),
            *("--namespace", _NAMESPACE, "--set", "crds.enabled=false"),
            # Each helm assumes another version, some one that is older than the chart allows.
            *("--kube-version", _KUBERNETES),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    # Versions of helm differ in empty lines.
    objects = re.sub(r"\n+---\n", "\n---\n", re.sub(r"(?m)^# Source: .*\n", "", told)).strip()
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


def _kept(definition: str) -> str:
    """The CRD as an uninstalled release leaves it behind."""
    return re.sub(
        r"(?m)^metadata:\n  name: \S+$", lambda found: found[0] + _KEEP, definition, count=1
    )


def _stamp() -> str:
    """Says what the chart was; its CRDs are rendered without helm and do not count."""
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
