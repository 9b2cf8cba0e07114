"""The service accounts of a deployment's pods, and what their processes need to call agents. Pure.

Called by the controller for worker and gateway pods. Agents accept calls that are signed as one of
these accounts (docs/decisions/credentials.md). What is hard: pods
must never run as an account that others have given rights to. So names contain a hash of the
owner's uid, which nobody knows before the owner exists, and the controller creates no pod before
the accounts have its owner reference.
"""

from dataclasses import dataclass
from hashlib import sha256

from cleave.manifests.labels import GATEWAY, Manifest
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV

_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Accounts:
    """The accounts of a deployment, by name."""

    namespace: str
    gateways: str
    workers: str

    @property
    def names(self) -> tuple[str, str]:
        """Of all accounts."""
        return self.gateways, self.workers

    def get_name(self, component: str) -> str:
        """Name of the account of the pods of a component."""
        return self.gateways if component == GATEWAY else self.workers


def name_accounts(namespace: str, deployment: str, uid: str = "") -> Accounts:
    """The accounts of a deployment with this uid; empty: of the pools that name a deployment which
    does not exist."""
    owner = uid or f"{namespace}/{deployment}"
    suffix = sha256(owner.encode()).hexdigest()[:_HASH_DIGITS]
    return Accounts(namespace, f"{deployment}-gateways-{suffix}", f"{deployment}-workers-{suffix}")


def add_credentials(spec: Manifest, component: str, accounts: Accounts, operator: str) -> Manifest:
    """Return a pod spec that runs as the account of its component, and whose agents accept calls of
    these accounts and of `operator`, the operator's account as
    `system:serviceaccount:NAMESPACE:NAME`."""
    prefix = f"system:serviceaccount:{accounts.namespace}:"
    variables = [
        {"name": CALLERS_ENV, "value": f"{prefix}{accounts.gateways},{operator}"},
        {"name": PEERS_ENV, "value": f"{prefix}{accounts.workers}"},
    ]
    containers = [
        {**each, "env": [*each.get("env", ()), *variables]} for each in spec["containers"]
    ]
    account = {"serviceAccountName": accounts.get_name(component)}
    return {**spec, **account, "containers": containers}
