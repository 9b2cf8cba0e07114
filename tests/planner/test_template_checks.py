"""What no pod of a template could have."""

import pytest

from cleave.api.pods.worker_template import WorkerTemplate
from cleave.planner.template_checks import list_template_faults


def find(**template: object) -> list[str]:
    return list(list_template_faults(WorkerTemplate.model_validate(template)))


def test_a_usual_template_is_taken() -> None:
    assert not find(
        resources={
            "requests": {"cpu": "500m", "memory": "6Gi", "rdma/ib": 1},
            "limits": {"memory": "6144Mi", "rdma/ib": "1", "nvidia.com/gpu": "1k"},
        },
        volumes=[{"name": "a", "emptyDir": {}}, {"name": "b"}],
        volumeMounts=[{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/b"}],
        resourceClaims=[{"name": "c", "resourceClaimTemplateName": "t"}],
    )


SOURCES = "resourceClaimName, resourceClaimTemplateName"
TWO_KINDS = {"name": "a", "emptyDir": {}, "hostPath": {"path": "/a"}}


@pytest.mark.parametrize(
    ("requests", "limits", "fault"),
    [
        ({"memory": "8Gi"}, {"memory": "6Gi"}, "requests: memory 8Gi is above its limit of 6Gi"),
        ({}, {"rdma/ib": "500m"}, "limits: rdma/ib must be a whole number (got 500m)"),
        ({"a/b": 1}, {}, "requests: a/b 1 must be among limits, with the same amount"),
        ({"a/b": 1}, {"a/b": 2}, "requests: a/b 1 must be among limits, with the same amount"),
    ],
)
def test_amounts_that_no_container_can_have_are_named(
    requests: dict[str, object], limits: dict[str, object], fault: str
) -> None:
    found = find(resources={"requests": requests, "limits": limits})
    assert found == [f"spec.template.resources.{fault}"]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "required, the folder in the container"),
        ("C:/a", "must not have a colon (got 'C:/a')"),
        ("/tmp/", "/tmp/ is a volume of every worker; choose another folder"),
    ],
)
def test_folders_that_cannot_be_mounted_are_named(path: str, fault: str) -> None:
    found = find(volumes=[{"name": "a"}], volumeMounts=[{"name": "a", "mountPath": path}])
    assert found == [f"spec.template.volumeMounts[0].mountPath: {fault}"]


def test_a_volume_has_one_kind_and_a_claim_one_source() -> None:
    assert find(volumes=[TWO_KINDS], resourceClaims=[{"name": "a"}]) == [
        "spec.template.volumes[0]: must have one kind (got emptyDir, hostPath)",
        f"spec.template.resourceClaims[0]: needs one of {SOURCES}",
    ]


def test_a_folder_is_mounted_once() -> None:
    mounts = [{"name": "a", "mountPath": "/a"}] * 2
    faults = find(volumes=[{"name": "a", "emptyDir": {}}], volumeMounts=mounts)
    assert (
        faults[0]
        == "spec.template.volumeMounts[0].mountPath: /a is mounted twice; choose another folder"
    )
    assert len(faults) == 2
