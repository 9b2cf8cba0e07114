"""Deployments and pools for the tests of pod manifests."""

from collections.abc import Callable
from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.api.pool import InstancePool
from cleave.manifests.topology import NodeTopology

from tests.support.built_pools import build_pools

MakeDeployment = Callable[..., LLMDeployment]
MakePool = Callable[..., InstancePool]
MakePools = Callable[..., list[InstancePool]]


@pytest.fixture
def deployment() -> MakeDeployment:
    """Makes a deployment named chat with further spec fields."""

    def make(namespace: str = "llm", **spec: Any) -> LLMDeployment:
        return validate(
            {
                "apiVersion": "cleave.dev/v1alpha1",
                "kind": "LLMDeployment",
                "metadata": {"name": "chat", "namespace": namespace},
                "spec": {"model": "org/model", "slo": {"ttftMs": 400, "tpotMs": 40}, **spec},
            }
        )

    return make


@pytest.fixture
def pool(deployment: MakeDeployment) -> MakePool:
    """Makes the decode pool of such a deployment."""

    def make(**spec: Any) -> InstancePool:
        chat = deployment(**spec)
        return next(p for p in build_pools(chat) if p.spec.role == "decode")

    return make


@pytest.fixture
def pools_of() -> MakePools:
    """Makes all pools of a deployment, on nodes of which nothing is known unless given."""

    def make(deployment: LLMDeployment, *machines: NodeTopology) -> list[InstancePool]:
        return build_pools(deployment, *machines)

    return make
