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
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from cleave import logs
from cleave.api.manifest import ManifestError, load_cluster
from cleave.controller.author_policy import allow_lists
from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.controller.cluster.client import KubeApiError, connect
from cleave.controller.cluster.leader_election import LeaseConfig
from cleave.controller.handlers import WatchError
from cleave.controller.manager import Manager, ManagerOptions, WebhookOptions
from cleave.controller.settings import OperatorSettings
from cleave.manifests.container import IMAGE_KINDS, Images
from cleave.manifests.network_policies import NetworkIsolation
from cleave.rpc.listen_addresses import parse_hosts, parse_port

log = logging.getLogger("cleave.controller")

PROGRAM = "python -m cleave.controller.main"
_EXIT_CODES = "Exit codes: 0 stopped by a signal, 1 failed or no cluster, 2 bad usage."


def run(options: ManagerOptions) -> int:
    """Run an operator until a signal ends it; returns the exit code."""
    try:
        asyncio.run(_serve(options))
    except KubeApiError as error:
        log.error("%s", error)
        return 1
    except OSError as error:
        log.error("cannot listen on %s, port %d: %s", ", ".join(options.hosts), options.port, error)
        return 1
    except Exception:
        log.exception("a part of the operator has failed")
        return 1
    return 0


async def _serve(options: ManagerOptions) -> None:
    kube = await connect()
    try:
        await Manager(kube, options).run()
    except WatchError as error:
        # The event loop would wait for the tasks that are left.
        log.critical("%s: the process ends", error)
        logging.shutdown()
        os._exit(1)
    finally:
        await kube.close()


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Parse the command line and run; `program` is the name that the help shows."""
    args = _build_parser(program).parse_args(arguments)
    _set_up_logging(args.log_level.upper(), args.log_format)
    try:
        cluster = load_cluster(args.cluster) if args.cluster else None
    except ManifestError as error:
        for fault in error.faults:
            log.error("--cluster: %s", fault)
        return 2
    try:
        lease_config = LeaseConfig(args.lease_duration, args.renew_deadline, args.retry_period)
    except ValueError as error:
        log.error("%s", error)
        return 2
    webhook = None
    if args.webhook:
        issues_certificate = args.webhook_certificate == "operator"
        webhook = WebhookOptions(args.webhook, args.webhook_port, issues_certificate)
    isolation = None
    if args.isolate_workers:
        isolation = NetworkIsolation(
            args.own_namespace,
            args.api_server_port,
            tuple(args.egress_port),
            tuple(args.scraper_namespace),
        )
    settings = OperatorSettings(
        namespace=args.own_namespace,
        images=Images(args.image_prefix, dict(args.image)),
        device=args.device,
        isolation=isolation,
        account=args.account,
        has_assigned_user=args.assigned_user,
        model_hub=args.model_hub,
        prometheus=args.prometheus,
        allow_lists=args.restrict_pods,
        traffic_poll_s=args.watch_interval,
        cluster=cluster,
    )
    options = ManagerOptions(
        # Unique per process: a predecessor of the same name may still have a write in flight.
        identity=f"{args.identity}_{uuid.uuid4().hex[:8]}",
        namespace=args.own_namespace,
        hosts=args.host,
        port=args.port,
        lease=args.lease,
        lease_config=lease_config,
        namespaces=tuple(args.namespace),
        webhook=webhook,
        settings=settings,
    )
    return run(options)


def _set_up_logging(level: str, log_format: str) -> None:
    logs.configure(log_format, level=level)
    # kopf logs every event, and every retry while the API server is unreachable.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # httpx logs every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)


def _build_parser(program: str) -> argparse.ArgumentParser:
    description = "Reconcile the LLMDeployments and InstancePools of a Kubernetes cluster."
    # Not all options in each error: their list is a screen long.
    usage = f"{program} [options]; {program} --help lists the options"
    parser = argparse.ArgumentParser(program, usage, description, _EXIT_CODES)
    add = parser.add_argument
    add(
        "--host",
        type=parse_hosts,
        default="0.0.0.0",  # noqa: S104 - probes and scrapes come from elsewhere
        metavar="HOST,...",
        help="addresses of /healthz, /readyz, /metrics and the webhook",
    )
    add("--port", type=parse_port, default=8081)
    add("--namespace", action="append", default=[], help="watch this namespace only; repeatable")
    add("--lease", default="cleave-operator", help="name of the leader election's Lease")
    defaults = LeaseConfig()
    add(
        "--lease-duration",
        type=int,
        default=defaults.lease_s,
        metavar="S",
        help="a standby operator leads when the leader has not renewed for this long (default: 15)",
    )
    add(
        "--renew-deadline",
        type=float,
        default=defaults.renew_deadline_s,
        metavar="S",
        help="the leader writes for this long after it has renewed (default: 10)",
    )
    add(
        "--retry-period",
        type=float,
        default=defaults.retry_s,
        metavar="S",
        help="between two attempts to renew or to lead (default: 2)",
    )
    add(
        "--own-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="namespace of the Lease (default: $POD_NAMESPACE)",
    )
    add(
        "--identity",
        default=os.environ.get("POD_NAME") or os.uname().nodename,
        help="identity of this operator in the Lease (default: $POD_NAME)",
    )
    add(
        "--account",
        default=OperatorSettings().account,
        metavar="NAME",
        help="service account of this operator, as system:serviceaccount:NAMESPACE:NAME; agents "
        "accept calls of it and of their deployment's only",
    )
    add(
        "--assigned-user",
        action="store_true",
        help="pods of deployments name no user and groups: the cluster assigns them (OpenShift)",
    )
    add("--image-prefix", default="", help="registry and path of Cleave's own images")
    add(
        "--image",
        action="append",
        default=[],
        type=_parse_image,
        metavar="KIND=REFERENCE",
        help=f"whole reference of an image, such as one with a digest; {', '.join(IMAGE_KINDS)}; "
        "repeatable",
    )
    add(
        "--isolate-workers",
        action="store_true",
        help="NetworkPolicies: only a deployment's pods and the operator may reach its workers and "
        "the gateways' internal port",
    )
    add(
        "--scraper-namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="whose pods may read the gateways' metrics through these policies; repeatable",
    )
    add(
        "--egress-port",
        action="append",
        default=[],
        type=parse_port,
        metavar="PORT",
        help="that workers may connect to besides 443, such as a model mirror's; repeatable",
    )
    add("--api-server-port", type=parse_port, default=6443, help="of the API server, besides 443")
    add(
        "--watch-interval",
        type=_parse_interval,
        default=15.0,
        metavar="S",
        help="seconds between two scrapes of the gateways' metrics (default: 15)",
    )
    add(
        "--restrict-pods",
        type=_parse_allow_lists,
        metavar="JSON",
        help="refuse deployments and pools whose pods would have more than Cleave itself needs and "
        f"than these lists hold: {', '.join(allow_lists.NAMES)} (default: they may have all that "
        "the resources have fields for)",
    )
    add("--device", choices=["gpu", "cpu"], default="gpu", help="device that the nodes compute on")
    add(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="cluster file with network, own GPUs and measured profiles",
    )
    add(
        "--model-hub",
        type=partial(_parse_url, example="https://huggingface.co"),
        default="",
        metavar="URL",
        help="read config.json of models that Cleave does not know from here, such as "
        "https://huggingface.co, with the token of $HF_TOKEN (default: not read)",
    )
    add(
        "--prometheus",
        type=partial(_parse_url, example="http://prometheus.monitoring:9090"),
        default="",
        metavar="URL",
        help="read the gateways' counters from this Prometheus, with the token of "
        "$PROMETHEUS_TOKEN; what it does not have is read from the gateways (default: all is)",
    )
    add("--webhook", default="", metavar="NAME", help="serve the validating webhook of this name")
    add("--webhook-port", type=parse_port, default=9443)
    add(
        "--webhook-certificate",
        choices=["operator", "cert-manager", "secret"],
        default="operator",
        help="who issues the webhook's certificate; secret: you, in the Secret of its name",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    logs.add_option(parser, "json")
    return parser


def _parse_allow_lists(text: str) -> AllowLists:
    try:
        return allow_lists.parse(text)
    except allow_lists.AllowListsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_url(text: str, example: str) -> str:
    parts = urlsplit(text)
    has_host = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    if text and (not has_host or parts.query or parts.fragment):
        raise argparse.ArgumentTypeError(f"{text!r}: must be like {example}")
    return text


def _parse_image(text: str) -> tuple[str, str]:
    kind, _, reference = text.partition("=")
    if kind not in IMAGE_KINDS or not reference:
        known = ", ".join(IMAGE_KINDS)
        raise argparse.ArgumentTypeError(f"{text}: must be KIND=REFERENCE with KIND of {known}")
    return kind, reference


def _parse_interval(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0.5 to 300")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
