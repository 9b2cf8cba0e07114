"""The Gateway API's own CRDs and those of its Inference Extension take the manifests of the guides.

No gateway runs: what a proxy then does with the picker is tested with a real Envoy (test_envoy).
"""

import re

import yaml

from e2e.cluster.cluster import Cluster
from e2e.support import third_party
from e2e.support.prometheus import ROOT


def test_the_guides_pool_and_route_are_valid_and_stored_as_written(
    cluster: Cluster, namespace: str
) -> None:
    for name, folder in (("gateway-api", "standard"), ("inference-extension", "bases")):
        third_party.apply_crds(cluster, third_party.find(name) / "manifests" / folder)
    guide = (ROOT / "docs" / "endpoint-picker.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    documents = list(yaml.safe_load_all(example))
    assert [each["kind"] for each in documents] == ["LLMDeployment", "InferencePool", "HTTPRoute"]
    for written in documents[1:]:
        cluster.apply(written, namespace=namespace)
        plural = f"{written['kind'].lower()}s.{written['apiVersion'].partition('/')[0]}"
        stored = yaml.safe_load(
            cluster.kubectl("get", plural, "chat", "-n", namespace, "-o", "yaml")
        )
        assert includes(stored["spec"], written["spec"])


def includes(stored: object, written: object) -> bool:
    """Whether nothing was dropped; the API server adds defaults."""
    if isinstance(written, dict):
        return isinstance(stored, dict) and all(
            includes(stored.get(name), value) for name, value in written.items()
        )
    if isinstance(written, list):
        return isinstance(stored, list) and all(
            includes(*pair) for pair in zip(stored, written, strict=True)
        )
    return stored == written
