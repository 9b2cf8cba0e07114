import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent


class StrictLoader(yaml.CSafeLoader):
    """Refuses a key that a mapping has twice, as Flux and `kubectl apply --server-side` do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len({*keys}) == len(keys), f"a key is there twice, line {node.start_mark.line + 1}"
        return super().construct_mapping(node, deep)


Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


def find(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The objects of one kind."""
    return [each for each in manifests if each["kind"] == kind]


@pytest.fixture(scope="session")
def chart() -> Path:
    return ROOT / "charts" / "cleave"


@pytest.fixture(scope="session")
def scripts() -> ModuleType:
    """scripts/manifests.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("manifests", ROOT / "scripts" / "manifests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helm(scripts: ModuleType) -> str:
    if (found := scripts.find_helm()) is None:
        pytest.skip("helm is not here; scripts/cluster-tools builds it")
    return found


@pytest.fixture(scope="session")
def render(helm: str, chart: Path) -> Render:
    """The chart's objects with `--set` values and `--values` files; CalledProcessError when helm
    refuses them."""

    def run(
        *values: str,
        namespace: str = "cleave-system",
        release: str = "cleave",
        files: Sequence[Path] = (),
    ) -> Any:
        sets = [part for value in values for part in ("--set", value)]
        sets += [part for file in files for part in ("--values", str(file))]
        completed = subprocess.run(
            [
                *(helm, "template", release, str(chart), "--namespace", namespace),
                *("--kube-version", "1.30.0", *sets),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [found for found in yaml.load_all(completed.stdout, StrictLoader) if found]

    return run


@pytest.fixture(scope="session")
def plain() -> list[Manifest]:
    """What manifests/ holds: the chart with its defaults, also where helm is not here."""
    text = (ROOT / "manifests" / "cleave.yaml").read_text()
    return [found for found in yaml.safe_load_all(text) if found]
