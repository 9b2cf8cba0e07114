"""Rules that every stage of images/Dockerfile keeps; no builder is needed to read it."""

import re
import tomllib
from pathlib import Path

import pytest

from cleave.manifests.container import UID

ROOT = Path(__file__).parent.parent.parent
TARGETS = ["operator", "gateway", "worker-emulated", "worker-cpu", "worker-cuda"]


def stages() -> dict[str, tuple[str, list[str]]]:
    """Stage -> what it starts from, and its instructions, continued lines joined."""
    text = (ROOT / "images" / "Dockerfile").read_text()
    lines = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ").splitlines()
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in filter(str.strip, lines):
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = match[1], []
        elif name:
            found[name][1].append(line)
    return found


def lineage(name: str) -> list[str]:
    """Instructions of a stage, of all that it starts from and copies from, earliest first."""
    start, own = stages()[name]
    sources = re.findall(r"COPY --from=(\S+)", " ".join(own))
    return [line for each in (start, *sources) if each in stages() for line in lineage(each)] + own


def test_everything_from_outside_is_pinned_by_a_hash() -> None:
    """Debian packages are not: the bill of materials of each build names their versions."""
    text = (ROOT / "images" / "Dockerfile").read_text()
    assert "# syntax" not in text
    bases = {base for base, _ in stages().values()} - stages().keys() - {"scratch"}
    assert bases == {"${BASE}"}
    installs = [line for line in text.splitlines() if re.search(r"pip install|uv sync", line)]
    assert installs
    assert all("--require-hashes" in line or "--frozen" in line for line in installs)
    bootstrap = (ROOT / "scripts" / "bootstrap").read_text().replace("\\\n", "")
    pip = [
        line for line in bootstrap.splitlines() if "pip install" in line or 'pip" install' in line
    ]
    assert len(pip) == 2
    assert all("--require-hashes" in line for line in pip)


@pytest.mark.parametrize("file", ["images/Dockerfile", "scripts/node-vllm"])
def test_cleave_is_built_of_the_sources_that_are_there(file: str) -> None:
    # uv takes a cached wheel of other sources where pyproject.toml is the same.
    text = (ROOT / file).read_text().replace("\\\n", "")
    installs = re.findall(r"uv sync .*--no-editable.*", text)
    assert installs
    assert all("--reinstall-package cleave-serving" in each for each in installs)


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_the_user_that_pods_name(target) -> None:
    users = [line.split()[1] for line in lineage(target) if line.startswith("USER ")]
    assert users[-1] == f"{UID}:{UID}"
    assert f"--uid {UID}" in " ".join(lineage(target))


@pytest.mark.parametrize("target", TARGETS)
def test_images_hold_the_extra_or_the_group_that_they_are_named_by(target) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    name = target.removesuffix("-emulated")
    is_extra = name in pyproject["project"]["optional-dependencies"]
    assert is_extra or name in pyproject["dependency-groups"]
    build = " ".join(stages()[f"build-{target}"][1])
    assert build.count(f"--{'extra' if is_extra else 'group'} {name}") == 2
    assert "--frozen --no-dev" in build


def test_what_compiles_the_gateway_comes_without_what_tests_it() -> None:
    (line,) = [line for line in stages()["compile-gateway"][1] if "uv sync" in line]
    assert "--no-default-groups --group compile" in " ".join(line.split())
    built = " ".join(stages()["build-gateway"][1])
    extras = set(re.findall(r"--extra (\S+)", built))
    assert set(re.findall(r"--extra (\S+)", line)) == extras, "all that it imports is there"
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    needed = {re.split(r"[\[>]", each)[0] for each in groups["compile"]}
    assert {each for each in needed if not each.startswith("types-")} == {"mypy"}


@pytest.mark.parametrize("target", TARGETS)
def test_images_start_what_pods_start(target) -> None:
    (command,) = [line for line in stages()[target][1] if line.startswith("CMD")]
    module = re.search(r'"-m", "([\w.]+)"', command)[1]
    top = "worker" if module.startswith("cleave_worker") else "operator"
    assert (ROOT / top / (module.replace(".", "/") + ".py")).exists()


def test_the_image_for_gpus_installs_the_packages_for_rdma() -> None:
    """Only their names: that NCCL and NIXL find the libraries shows on a machine with RDMA."""
    installed = {
        package
        for line in lineage("worker-cuda")
        for packages in re.findall(r"apt-get install (.*?)&&", line)
        for package in packages.split()
    }
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= installed


def test_the_operators_machine_code_is_for_the_cpu_that_it_asks_for() -> None:
    (warming,) = [line for line in stages()["build-operator"][1] if "simulator.warm" in line]
    setting = "NUMBA_CPU_NAME=generic"
    assert setting in warming
    assert f"ENV {setting}" in stages()["operator"][1]
    assert "XDG_CACHE_HOME=/opt/cleave/share" in warming, "below the prefix of its Python"


def test_base_images_are_pinned_and_another_can_be_named() -> None:
    text = (ROOT / "images" / "Dockerfile").read_text()
    version = re.search(r"ARG BASE=docker.io/library/python:(\S+)", text)[1]
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", version)
    bases = {start for start, _ in stages().values() if start not in stages()}
    assert bases == {"${BASE}", "scratch"}


@pytest.mark.parametrize("target", ["operator", "gateway", "worker-emulated"])
def test_small_images_start_empty_and_import_their_programs_at_the_build(target) -> None:
    start, own = stages()[target]
    assert stages()[start][0] == "scratch"
    (command,) = [line for line in own if line.startswith("CMD")]
    (collected,) = [line for line in stages()[f"root-{target}"][1] if "collect_root" in line]
    assert re.search(r'"-m", "([\w.]+)"', command)[1] in collected.split()


def test_the_gateways_image_holds_the_command_line_for_jobs() -> None:
    (collected,) = [line for line in stages()["root-gateway"][1] if "collect_root" in line]
    assert "cleave.cli.main" in collected.split()


@pytest.mark.parametrize("target", TARGETS)
def test_images_name_their_version_revision_and_licence(target) -> None:
    labels = " ".join(line for line in lineage(target) if line.startswith("LABEL"))
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_vllm_on_cpu_finds_the_allocator_that_it_preloads() -> None:
    lines = " ".join(lineage("worker-cpu"))
    assert "libtcmalloc-minimal4" in lines
    assert re.search(r"ln -s \S+/libtcmalloc_minimal.so.4 \S+/site-packages/vllm/libs/", lines)


def test_the_builder_sees_nothing_but_what_it_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        part
        for start, lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for part in line.split()[1:-1]
    }
    mounted = re.findall(
        r"--mount=type=bind,source=(\S+?),", (ROOT / "images/Dockerfile").read_text()
    )
    assert copied | set(mounted) == allowed
