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

from cleave import logs
from cleave.api.manifest import ManifestError, load_cluster
from cleave.controller.cluster.client import KubeApiError, connect
from cleave.controller.cluster.leader_election import LeaseConfig
from cleave.controller.handlers import WatchError
from cleave.controller.manager import Manager, ManagerOptions, WebhookOptions
from cleave.controller.settings import OperatorSettings
from cleave.manifests.container import IMAGE_KINDS, Images
from cleave.manifests.network_policies import NetworkIsolation
from cleave.options import add_options, read_options

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
        lease_config = read_options(LeaseConfig, args)
    except ValueError as error:
        log.error("%s", error)
        return 2
    settings = read_options(
        OperatorSettings,
        args,
        images=Images(args.image_prefix, dict(args.image)),
        isolation=read_options(NetworkIsolation, args, operator_namespace=args.own_namespace)
        if args.isolate_workers
        else None,
        cluster=cluster,
    )
    options = read_options(
        ManagerOptions,
        args,
        # Unique per process: a predecessor of the same name may still have a write in flight.
        identity=f"{args.identity}_{uuid.uuid4().hex[:8]}",
        lease_config=lease_config,
        webhook=read_options(WebhookOptions, args),
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
    add_options(parser, ManagerOptions, LeaseConfig, OperatorSettings, WebhookOptions)
    add = parser.add_argument
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
    add_options(parser, NetworkIsolation)
    add(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="cluster file with network, own GPUs and measured profiles",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    logs.add_option(parser, "json")
    return parser


def _parse_image(text: str) -> tuple[str, str]:
    kind, _, reference = text.partition("=")
    if kind not in IMAGE_KINDS or not reference:
        known = ", ".join(IMAGE_KINDS)
        raise argparse.ArgumentTypeError(f"{text}: must be KIND=REFERENCE with KIND of {known}")
    return kind, reference


if __name__ == "__main__":
    sys.exit(main())
