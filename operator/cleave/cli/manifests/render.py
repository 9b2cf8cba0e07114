"""`cleave render`: prints the objects that the operator would create."""

from typing import Annotated

import typer
from typer import Option

from cleave.cli.manifests.rollout import build_topology, decide_cluster_placement
from cleave.cli.options import File
from cleave.cli.output.errors import load_deployment
from cleave.cli.planning.inputs import ClusterFile

_OPERATOR_ACCOUNT = "system:serviceaccount:cleave-system:cleave-operator"
"""Of the chart, installed as docs/install.md does."""


def render(
    file: File,
    cluster: ClusterFile = None,
    image_prefix: Annotated[
        str, Option(help="Registry and path of Cleave's images, as images.prefix of the chart.")
    ] = "",
) -> None:
    """Print the Kubernetes objects of a deployment as YAML, without a cluster.

    They are the operator's, with the chart's defaults: accounts, Services, the gateway, network
    policies, pools, and the pods of one instance of each pool. Devices for RDMA that the operator
    adds from the nodes are absent.

    Exit codes: 0 printed, 1 no plan meets the SLO, 2 the input is invalid.

    \b
    Examples:
      # See the pods of a deployment on GPUs
      cleave render -f examples/gpus.yaml --cluster cluster.yaml
    """
    import yaml

    from cleave.controller.object_preview import list_objects
    from cleave.controller.settings import OperatorSettings
    from cleave.manifests.container import Images
    from cleave.manifests.network_policies import NetworkIsolation

    deployment = load_deployment(file)
    placement = decide_cluster_placement(deployment, file, cluster)
    settings = OperatorSettings(
        images=Images(image_prefix), isolation=NetworkIsolation(), account=_OPERATOR_ACCOUNT
    )
    objects = list_objects(deployment, placement, build_topology(cluster), settings)
    typer.echo(yaml.safe_dump_all(objects, sort_keys=False), nl=False)
