"""The lists that the chart gives the operator."""

import json
from pathlib import Path

import pytest
import yaml

from cleave.controller.author_policy.allow_lists import (
    NAMES,
    AllowListsError,
    add_own_images,
    parse,
)
from cleave.controller.author_policy.pod_rules import matches
from cleave.controller.author_policy.pod_table import FIELDS
from cleave.controller.author_policy.volume_table import VOLUMES
from cleave.manifests.container import Images

CHART = Path(__file__).parents[3] / "charts" / "cleave"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object of lists"),
        ('{"image": []}', "image: there is no such list; there are args, configMaps"),
        ('{"env": "A"}', "env: must be a list of texts"),
        ('{"env": [1]}', "env: must be a list of texts"),
        ('{"env": ["A*B"]}', "env: 'A*B': * stands at the end only"),
        ('{"env": [""]}', "env: '': * stands at the end only"),
        ('{"volumes": ["gitRepo"]}', "volumes: 'gitRepo': must be one of awsElasticBlockStore"),
        ('{"fields": ["hostPID"]}', "fields: 'hostPID': must be one of hostNetwork"),
        ('{"folders": ["data"]}', "folders: 'data': must be an absolute path without *"),
        ('{"folders": ["/data*"]}', "folders: '/data*': must be an absolute path without *"),
    ],
)
def test_a_fault_is_named(text: str, fault: str) -> None:
    with pytest.raises(AllowListsError) as error:
        parse(text)
    assert str(error.value).startswith(fault)


def test_entries_are_whole_or_beginnings() -> None:
    lists = parse('{"env": ["A", "B*"], "folders": ["/x/", "/"], "volumes": ["*"]}')
    assert lists == {"env": ("A", "B*"), "folders": ("/x", ""), "volumes": ("*",)}
    assert matches("A", lists["env"])
    assert matches("BC", lists["env"])
    assert not matches("AB", lists["env"])


@pytest.mark.parametrize(
    ("images", "allowed", "refused"),
    [
        (Images(), "cleave-worker-cuda:9.9", "cleave-worker-cuda-of-mine:1"),
        (Images("r:5000/c/"), "r:5000/c/cleave-gateway@sha256:ab", "r:5000/cleave-gateway:1"),
        (Images("", {"gateway": "r:5000/own:2@sha256:ab"}), "r:5000/own:3", "r:5000/own2:3"),
        (Images("", {"gateway": "r:5000/own"}), "r:5000/own:3", "r:5000/ow:3"),
    ],
)
def test_cleaves_own_images_of_any_version_are_allowed(
    images: Images, allowed: str, refused: str
) -> None:
    lists = add_own_images({"images": ("x",)}, images)["images"]
    assert matches(allowed, lists)
    assert matches("x", lists)
    assert not matches(refused, lists)


def test_the_charts_values_and_their_schema_have_these_lists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["policy"]
    assert values["profile"] == "Open"
    assert values["allow"] == {name: [] for name in NAMES}
    schema = json.loads((CHART / "values.schema.json").read_text())
    properties = schema["properties"]["policy"]["properties"]["allow"]["properties"]
    assert set(properties) == {*NAMES}
    assert properties["fields"]["items"]["enum"] == ["*", *FIELDS]
    assert properties["volumes"]["items"]["enum"] == ["*", *VOLUMES]
