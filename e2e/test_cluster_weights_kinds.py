"""Images, volumes and a branch of weights that change on a cluster, under load."""

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster.changing_weights import (
    Kind,
    make_branch,
    make_claim,
    make_image,
    make_moved_tag,
    roll_out,
)
from e2e.cluster.cluster import Cluster
from e2e.test_cluster_operator import installed

__all__ = ["installed"]
pytestmark = pytest.mark.timeout(1200)
Make = Callable[[Cluster, str, Path], Kind]


@pytest.mark.parametrize("make", [make_image, make_claim])
def test_other_weights_are_a_rollout(
    installed: Cluster, namespace: str, tmp_path: Path, make: Make
) -> None:
    roll_out(installed, namespace, tmp_path, make(installed, namespace, tmp_path))


@pytest.mark.parametrize("make", [make_moved_tag, make_branch])
def test_what_a_name_stands_for_is_rolled_out_once_an_engine_has_loaded_it(
    installed: Cluster, namespace: str, tmp_path: Path, make: Make
) -> None:
    kind = make(installed, namespace, tmp_path)
    assert "RollingOut" in roll_out(installed, namespace, tmp_path, kind)
