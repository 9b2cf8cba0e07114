"""cert-manager's own controllers issue and renew certificates of the webhook and of a gateway."""

import base64
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.cluster.cluster import Cluster, CommandError, wait_until
from e2e.support import third_party
from e2e.test_cluster_operator import CHAT, SYSTEM, Chat, deployed, installation, read_log

pytestmark = pytest.mark.timeout(400)

WAIT_S = 60
WEBHOOK = "cleave-webhook"
VALIDATIONS = 30
"""Dry runs right after a renewal, a few seconds' worth."""
THREE_GPUS = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: wrong}
spec:
  model: {source: facebook/opt-13b}
  slo: {ttftMs: 400, tpotMs: 40}
  placement: {manual: [{role: mixed, replicas: 1, parallelism: {tensor: 3}}]}
"""
"""The CRD admits it; the webhook, which knows the model's 40 attention heads, does not."""
ISSUER = """
apiVersion: cert-manager.io/v1
kind: Issuer
metadata: {name: own}
spec: {selfSigned: {}}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: chat}
spec:
  secretName: chat-tls
  dnsNames: [chat.example.com]
  issuerRef: {kind: Issuer, name: own}
"""


@dataclass(frozen=True)
class Webhook:
    """Cleave's webhook, whose certificate cert-manager issues; its failures reject resources."""

    cluster: Cluster

    def validate(self, manifest: str) -> str:
        """What the API server says of a manifest; empty: it is valid."""
        try:
            self.cluster.kubectl("create", "--dry-run=server", "-f", "-", input=manifest)
        except CommandError as error:
            return error.text
        return ""

    def bundle(self) -> bytes:
        """The CA that the API server trusts."""
        found = self.cluster.get("validatingwebhookconfiguration", WEBHOOK) or {}
        return base64.b64decode(found["webhooks"][0]["clientConfig"].get("caBundle", ""))


def secret_file(cluster: Cluster, namespace: str, name: str, file: str) -> bytes:
    found = cluster.get("secret", name, namespace) or {}
    return base64.b64decode((found.get("data") or {}).get(file, ""))


def renew(cluster: Cluster, namespace: str, name: str, secret: str) -> None:
    """As `cmctl renew` does; returns when the new certificate is in its Secret."""
    before = secret_file(cluster, namespace, secret, "tls.crt")
    condition = '{"type":"Issuing","status":"True","reason":"ManuallyTriggered","message":"test"}'
    cluster.kubectl(
        *("patch", "certificate", name, "-n", namespace, "--subresource=status", "--type=json"),
        f'-p=[{{"op":"add","path":"/status/conditions/-","value":{condition}}}]',
    )
    wait_until(
        lambda: secret_file(cluster, namespace, secret, "tls.crt") not in (b"", before),
        WAIT_S,
        f"{secret} is renewed",
    )


@pytest.fixture(scope="module")
def certified(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with cert-manager, and with Cleave installed for it."""
    built = third_party.find("cert-manager")
    folder = tmp_path_factory.mktemp("cert-manager")
    third_party.apply_crds(cluster, built / "manifests" / "crds")
    env = {"KUBECONFIG": str(cluster.kubeconfig)}
    with (
        third_party.running([built / "cert-manager"], folder / "cert-manager.log", env),
        installation(
            cluster,
            "--set=webhook.certificate=cert-manager",
            "--set=webhook.failurePolicy=Fail",
        ),
    ):
        yield cluster


def test_the_webhook_serves_with_a_certificate_that_the_api_server_trusts(
    certified: Cluster,
) -> None:
    webhook = Webhook(certified)
    wait_until(lambda: webhook.validate(CHAT) == "", WAIT_S, "a valid resource is admitted")
    assert webhook.bundle() == secret_file(certified, SYSTEM, WEBHOOK, "ca.crt")
    assert 'admission webhook "validate.cleave.dev" denied' in webhook.validate(THREE_GPUS)


def test_no_validation_fails_while_the_webhooks_certificate_is_renewed(certified: Cluster) -> None:
    webhook = Webhook(certified)
    wait_until(lambda: webhook.validate(CHAT) == "", WAIT_S, "the webhook serves")
    renew(certified, SYSTEM, WEBHOOK, WEBHOOK)
    said = {webhook.validate(CHAT) for _ in range(VALIDATIONS)}
    assert said == {""}, read_log(certified)


def test_a_gateway_serves_tls_and_its_renewed_certificate(
    certified: Cluster, namespace: str, tmp_path: Path
) -> None:
    certified.apply(*yaml.safe_load_all(ISSUER), namespace=namespace)
    certified.kubectl(
        *("wait", "--for=condition=Ready", "certificate/chat", "-n", namespace, "--timeout=60s")
    )
    manifest = yaml.safe_load(CHAT)
    manifest["spec"]["gateway"] = {"tlsSecret": "chat-tls"}
    with deployed(certified, namespace, yaml.safe_dump(manifest)) as chat:
        assert models(chat, tmp_path) == ["chat"]
        renew(certified, namespace, "chat", "chat-tls")

        def serves_renewed() -> bool:
            # Trusts the new certificate only: it is its own CA.
            try:
                return models(chat, tmp_path) == ["chat"]
            except httpx.ConnectError:
                return False

        wait_until(serves_renewed, WAIT_S, "the gateway serves the renewed certificate")


def models(chat: Chat, folder: Path) -> list[str]:
    """Over TLS, trusting what the Secret names; by the name in the certificate."""
    authority = folder / "ca.crt"
    authority.write_bytes(secret_file(chat.cluster, chat.namespace, "chat-tls", "ca.crt"))
    address = chat.address.removesuffix(":80") + ":443"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(authority))) as client:
        answer = client.get(
            f"https://{address}/v1/models",
            headers={"Host": "chat.example.com"},
            extensions={"sni_hostname": "chat.example.com"},
        )
    return [model["id"] for model in answer.json()["data"]]
