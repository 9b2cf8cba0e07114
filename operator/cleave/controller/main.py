"""`python -m cleave.controller.main`, the command that the operator's pods run.

Exit codes: 0 stopped by a signal, 1 a part has failed or there is no cluster, 2 bad usage.
"""

import argparse
import asyncio
import logging
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from cleave.api.manifest import ManifestError, load_cluster
from cleave.controller.kube import ApiError, connect
from cleave.controller.operator import Operator, Options, WebhookOptions
from cleave.controller.settings import Settings
from cleave.metrics import logs
from cleave.rpc.listen import parse_hosts

log = logging.getLogger("cleave.controller")

PROGRAM = "python -m cleave.controller.main"
_EXIT_CODES = "Exit codes: 0 stopped by a signal, 1 failed or no cluster, 2 bad usage."


def run(options: Options) -> int:
    """Run an operator until a signal ends it; the exit code."""
    try:
        asyncio.run(_serve(options))
    except ApiError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("cannot listen on %s, port %d: %s", ", ".join(options.hosts), options.port, error)
        return 1
    except Exception:
        log.exception("a part of the operator has failed")
        return 1
    return 0


async def _serve(options: Options) -> None:
    kube = await connect()
    try:
        await Operator(kube, options).run()
    finally:
        await kube.close()


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Read the command line and run; `program` is how the help names it."""
    stated = _build_parser(program).parse_args(arguments)
    _log(stated.log_level.upper(), stated.log_format)
    try:
        cluster = load_cluster(stated.cluster) if stated.cluster else None
    except ManifestError as error:
        for fault in error.faults:
            log.error("--cluster: %s", fault)
        return 2
    webhook = None
    if stated.webhook:
        issues = stated.webhook_certificate == "operator"
        webhook = WebhookOptions(stated.webhook, stated.webhook_port, issues)
    return run(
        Options(
            # A process that starts anew is another one: the old may still have a write under way.
            identity=f"{stated.identity}_{uuid.uuid4().hex[:8]}",
            namespace=stated.own_namespace,
            hosts=stated.host,
            port=stated.port,
            lease=stated.lease,
            namespaces=tuple(stated.namespace),
            webhook=webhook,
            settings=Settings(
                namespace=stated.own_namespace,
                image_prefix=stated.image_prefix,
                discovery_role=stated.discovery_role,
                device=stated.device,
                isolates=stated.isolate_workers,
                watch_s=stated.watch_interval,
                cluster=cluster,
            ),
        )
    )


def _log(level: str, log_format: str) -> None:
    logs.set_up(log_format, level=level)
    # They tell of every event that is handed over, and of every try while the API server is away.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)


def _build_parser(program: str) -> argparse.ArgumentParser:
    description = "Look after the LLMDeployments and InstancePools of a Kubernetes cluster."
    parser = argparse.ArgumentParser(program, description=description, epilog=_EXIT_CODES)
    add = parser.add_argument
    add(
        "--host",
        type=parse_hosts,
        default="0.0.0.0",  # noqa: S104 - probes and scrapes come from elsewhere
        metavar="HOST,...",
        help="addresses of /healthz, /readyz, /metrics and the webhook",
    )
    add("--port", type=int, default=8081)
    add("--namespace", action="append", default=[], help="look after this one only; repeatable")
    add("--lease", default="cleave-operator", help="name of the lease that says who writes")
    add(
        "--own-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="where the lease is (default: $POD_NAMESPACE)",
    )
    add(
        "--identity",
        default=os.environ.get("POD_NAME") or os.uname().nodename,
        help="name of this operator (default: $POD_NAME)",
    )
    add("--image-prefix", default="", help="registry and folder of Cleave's own images")
    add("--discovery-role", default="cleave-discovery", help="ClusterRole that pods are bound to")
    add(
        "--isolate-workers",
        action="store_true",
        help="NetworkPolicies: workers are reached from their deployment and this namespace only",
    )
    add(
        "--watch-interval",
        type=_seconds,
        default=15.0,
        metavar="S",
        help="seconds between two looks at the gateways' counts (default: 15)",
    )
    add("--device", choices=["gpu", "cpu"], default="gpu", help="what computes tokens")
    add("--cluster", type=Path, metavar="FILE", help="network, own GPUs and measured profiles")
    add("--webhook", default="", metavar="NAME", help="serve the validating webhook of this name")
    add("--webhook-port", type=int, default=9443)
    add(
        "--webhook-certificate",
        choices=["operator", "cert-manager"],
        default="operator",
        help="who makes the webhook's certificate",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    logs.add_option(parser, "json")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0.5 to 300")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
