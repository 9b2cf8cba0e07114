"""`python -m cleave.controller.install_check`: what `helm test` runs in a pod of its own.

Checks through the API server what an installation is for: an operator leads, a deployment is
admitted, and one that only the webhook can refuse is refused. Nothing is created (dryRun). Prints
a line for each check. Exit codes: 0 all hold, 1 some do not, 2 bad usage or no access.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx

from cleave.rpc.kube_api import AccessError, ApiServerAccess, find_access

TIMEOUT_S = 20.0
_SLACK = timedelta(seconds=10)
"""Clocks of nodes differ."""
_VALID = {"model": "facebook/opt-13b", "slo": {"ttftMs": 400, "tpotMs": 40}}
_FOR_WEBHOOK = _VALID | {"placement": {"manual": [{"role": "mixed", "parallelism": {"tensor": 7}}]}}
"""Rules of CRDs know no models; only the webhook knows that this one has 40 attention heads."""
_REFUSAL = "attention heads"


class CheckError(Exception):
    """A check does not hold; the message is one sentence with the remedy."""


def run_checks(
    access: ApiServerAccess, lease: str, namespace: str, *, has_webhook: bool, now: datetime
) -> Iterator[tuple[bool, str]]:
    """(whether it holds, a sentence) of each check.
    `lease`: NAMESPACE/NAME of the operator's Lease; `namespace`: one that the operator watches;
    `now`: aware."""
    checks = [
        partial(_check_leader, access, lease, now),
        partial(_check_admitted, access, namespace),
    ]
    if has_webhook:
        checks.append(partial(_check_refused, access, namespace))
    for check in checks:
        try:
            yield True, check()
        except CheckError as error:
            yield False, str(error)


def _check_leader(access: ApiServerAccess, lease: str, now: datetime) -> str:
    namespace, _, name = lease.partition("/")
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
    status, body = request(access, path)
    if status != 200:
        raise CheckError(f"the Lease {lease} cannot be read: {describe(status, body)}")
    spec = body.get("spec", {})
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        raise CheckError(f"no operator holds the Lease {lease}: look at the operator's log")
    age = now - datetime.fromisoformat(renewed)
    if age > timedelta(seconds=spec.get("leaseDurationSeconds") or 0) + _SLACK:
        seconds = age.total_seconds()
        raise CheckError(
            f"operator {holder} renewed the Lease {lease} {seconds:.0f} s ago: it is gone"
        )
    return f"operator {holder} leads"


def _check_admitted(access: ApiServerAccess, namespace: str) -> str:
    status, body = _create(access, namespace, _VALID)
    if status != 201:
        raise CheckError(f"a valid LLMDeployment is refused: {describe(status, body)}")
    return "the API server admits a valid LLMDeployment"


def _check_refused(access: ApiServerAccess, namespace: str) -> str:
    status, body = _create(access, namespace, _FOR_WEBHOOK)
    if status == 201:
        raise CheckError(
            "an LLMDeployment that the webhook refuses is admitted: the API server does not reach "
            "the operator's port 9443, or trusts another CA; see the operator's log, and "
            "firewalls between API server and pods"
        )
    if _REFUSAL not in str(body.get("message", "")):
        raise CheckError(f"the webhook does not answer as expected: {describe(status, body)}")
    return "the webhook refuses a parallel size that the model's heads do not allow"


def _create(
    access: ApiServerAccess, namespace: str, spec: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "install-check"},
        "spec": spec,
    }
    path = f"/apis/cleave.dev/v1alpha1/namespaces/{namespace}/llmdeployments?dryRun=All"
    return request(access, path, json.dumps(manifest).encode())


def request(
    access: ApiServerAccess, path: str, body: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    """(status, decoded body); POST if there is a body. Raises CheckError without an answer."""
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if access.token:
        headers["Authorization"] = f"Bearer {access.token}"
    try:
        response = httpx.request(
            "GET" if body is None else "POST",
            access.url + path,
            content=body,
            headers=headers,
            verify=access.tls or True,
            timeout=TIMEOUT_S,
        )
    except httpx.HTTPError as error:
        raise CheckError(f"the API server at {access.url} does not answer: {error}") from None
    return response.status_code, _decode(response.content)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(body)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def describe(status: int, body: dict[str, Any]) -> str:
    """An unexpected answer of the API server, for a message."""
    return f"{body.get('message', 'no message')} (status {status})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = build_parser().parse_args(arguments)
    try:
        access = find_access()
    except AccessError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    checks = run_checks(
        access,
        options.lease,
        options.namespace,
        has_webhook=options.webhook,
        now=datetime.now(UTC),
    )
    holds_all = True
    for holds, sentence in checks:
        print(f"{'ok' if holds else 'FAILED'}: {sentence}", flush=True)  # noqa: T201 - its output
        holds_all = holds_all and holds
    return 0 if holds_all else 1


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m cleave.controller.install_check",
        description="Check through the API server that Cleave is installed and works.",
    )
    parser.add_argument("--lease", required=True, metavar="NAMESPACE/NAME", help="of the operator")
    parser.add_argument("--namespace", required=True, help="a namespace that the operator watches")
    parser.add_argument("--webhook", action="store_true", help="check the webhook as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
