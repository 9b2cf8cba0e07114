"""A folder of weights that changes on a cluster, under load; `*_weights_kinds.py` has others."""

from pathlib import Path

import pytest

from e2e.cluster.changing_weights import make_folder, roll_out
from e2e.cluster.cluster import Cluster
from e2e.test_cluster_operator import installed

__all__ = ["installed"]
pytestmark = pytest.mark.timeout(1200)


def test_a_changed_folder_is_rolled_out_once_an_engine_has_loaded_it(
    installed: Cluster, namespace: str, tmp_path: Path
) -> None:
    kind = make_folder(installed, namespace, tmp_path)
    assert "RollingOut" in roll_out(installed, namespace, tmp_path, kind)
