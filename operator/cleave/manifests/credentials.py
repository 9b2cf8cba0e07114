"""Adds to pod specs the token with which their processes call agents. Pure.

Called by the controller for worker and gateway pods. The token is one of the pod's own service
account, for agents only: kubelet requests and replaces it, so the operator needs no right to any
Secret (docs/decisions/059-agents-verify-service-account-tokens.md).
"""

from cleave.manifests.labels import WORKER, Manifest, get_account_name
from cleave.rpc.credentials import ACCOUNTS_ENV, AUDIENCE, CALLERS_ENV, PEERS_ENV, TOKEN_ENV

_VOLUME = "agent-token"
_FOLDER = "/etc/cleave/agent-token"
_LIFE_S = 3600
"""Seconds; kubelet replaces a token after 80 % of its life."""


def add_credentials(spec: Manifest, deployment: str, namespace: str, operator: str) -> Manifest:
    """Return a pod spec whose containers have a token, and accept those of the deployment's own
    accounts and of `operator`, the operator's account as `system:serviceaccount:NAMESPACE:NAME`."""
    prefix = f"system:serviceaccount:{namespace}:"
    token = {"audience": AUDIENCE, "path": "token", "expirationSeconds": _LIFE_S}
    source = {"sources": [{"serviceAccountToken": token}]}
    mount = {"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True}
    callers = f"{prefix}{get_account_name(deployment)},{operator}"
    workers = f"{prefix}{get_account_name(deployment, WORKER)}"
    variables = [
        {"name": TOKEN_ENV, "value": f"{_FOLDER}/token"},
        # An image of the version before knows this list alone, also for tests between workers.
        {"name": ACCOUNTS_ENV, "value": f"{callers},{workers}"},
        {"name": CALLERS_ENV, "value": callers},
        {"name": PEERS_ENV, "value": workers},
    ]
    containers = [
        {
            **each,
            "env": [*each.get("env", ()), *variables],
            "volumeMounts": [*each.get("volumeMounts", ()), mount],
        }
        for each in spec["containers"]
    ]
    volumes = [*spec.get("volumes", ()), {"name": _VOLUME, "projected": source}]
    return {**spec, "containers": containers, "volumes": volumes}
