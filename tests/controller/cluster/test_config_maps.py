"""A ConfigMap as it was read, or the reason in words."""

from typing import Any

import pytest

from cleave.controller.cluster.cache import ReadConfigMap
from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.config_maps import read_config_map


class Kube:
    """Answers one GET."""

    def __init__(self, answer: dict[str, Any] | KubeApiError) -> None:
        self.answer = answer

    async def get(self, *path: str) -> dict[str, Any]:
        assert path == ("ConfigMap", "team", "new")
        if isinstance(self.answer, KubeApiError):
            raise self.answer
        return self.answer


async def read(answer: dict[str, Any] | KubeApiError) -> ReadConfigMap:
    return await read_config_map(Kube(answer), "team", "new")  # type: ignore[arg-type]


async def test_a_config_map_is_its_entries() -> None:
    assert await read({"data": {"config.json": "{}"}}) == ReadConfigMap(
        "new", {"config.json": "{}"}
    )
    assert await read({}) == ReadConfigMap("new")


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "ConfigMap new of namespace team does not exist"), (403, "needs get of configmaps")],
)
async def test_one_that_cannot_be_read_says_why(status: int, reason: str) -> None:
    assert reason in (await read(KubeApiError(status, "Refused", "no"))).fault


async def test_an_error_that_may_pass_is_raised() -> None:
    with pytest.raises(KubeApiError):
        await read(KubeApiError(503, "Unavailable", "later"))
