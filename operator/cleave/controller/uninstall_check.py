"""`python -m cleave.controller.uninstall_check`: run before `helm uninstall` removes anything.

Refuses while LLMDeployments are left: their pods would run on without an operator, with a gateway
that may not discover workers any more, and their finalizers would wait for an operator. Prints what
is left and the ways on. What is hard: Helm notes a release whose hook fails as `uninstalling`, and
upgrades it only after a rollback, which the message therefore names. Exit codes: 0 none is left, 1
some are, 2 bad usage or no access.
"""

import argparse
import sys
from collections.abc import Sequence

from cleave.controller.install_check import CheckError, describe, request
from cleave.rpc.kube_api import AccessError, ApiServerAccess, find_access

_SHOWN = 10
"""Names in the message."""


def find_left(access: ApiServerAccess, namespaces: Sequence[str]) -> list[str]:
    """NAMESPACE/NAME of every LLMDeployment in these namespaces; none given: in all. Raises
    CheckError."""
    left: list[str] = []
    for part in [f"/namespaces/{name}" for name in namespaces] or [""]:
        status, body = request(access, f"/apis/cleave.dev/v1alpha1{part}/llmdeployments")
        # Without the CRD there is none.
        if status not in (200, 404):
            raise CheckError(f"LLMDeployments cannot be listed: {describe(status, body)}")
        for item in body.get("items", ()):
            left.append(f"{item['metadata']['namespace']}/{item['metadata']['name']}")
    return sorted(left)


def explain(left: Sequence[str], namespaces: Sequence[str], rollback: str) -> str:
    """What to do about deployments that are left. `rollback`: what keeps the release instead."""
    names = ", ".join(left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
    where = "--all-namespaces" if not namespaces else f"-n {', then -n '.join(namespaces)}"
    return (
        f"{len(left)} LLMDeployments are left ({names}). Let the operator drain and remove them: "
        f"kubectl delete llmdeployments --all {where}. To uninstall all the same and let them run "
        f"on without an operator: helm uninstall --no-hooks. To keep the release: {rollback}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = build_parser().parse_args(arguments)
    try:
        left = find_left(find_access(), options.namespace)
    except (AccessError, CheckError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if left:
        sys.stderr.write(f"error: {explain(left, options.namespace, options.rollback)}\n")
        return 1
    print("no LLMDeployment is left")  # noqa: T201 - its output
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m cleave.controller.uninstall_check",
        description="Check through the API server that no LLMDeployment is left.",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="look in this one only; repeatable"
    )
    parser.add_argument(
        "--rollback",
        required=True,
        metavar="COMMAND",
        help="which lets Helm upgrade the release again",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
