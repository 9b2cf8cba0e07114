"""The control plane and the operators of a test cluster are hurt: `run.py cluster`."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

from e2e.chaos.control_plane import ControlPlaneReport, ControlPlaneStorm, draw
from e2e.cluster.cluster import opened
from e2e.test_cluster_operator import CHAT, Chat, installation

NAMESPACE = "chaos"
BURST = 5


def hurt_control_plane(
    folder: Path, options: argparse.Namespace, report_progress: Callable[[str, int, int], None]
) -> ControlPlaneReport:
    """Needs the programs of `scripts/cluster-tools` and a network of the run's own."""
    report = ControlPlaneReport(options.seed)
    drawn = draw(random.Random(options.seed), options.faults)
    with opened(folder) as cluster, installation(cluster):
        if cluster.control_plane is None or cluster.nodes is None:
            raise SystemExit("run.py cluster: KUBECONFIG is set; a run breaks its own cluster only")
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=CHAT)
        chat = Chat(cluster, NAMESPACE)
        chat.until_ready()
        storm = ControlPlaneStorm(
            chat,
            cluster.control_plane,
            report,
            lambda what, done: report_progress(what, done, len(drawn)),
        )
        storm.run(drawn, BURST, options.seconds)
        cluster.kubectl("delete", "llmd", "--all", "-n", NAMESPACE, timeout_s=180)
    return report
