"""Rules of the repository that a machine can keep."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for top in ("operator/cleave", "worker/cleave_worker")
    for path in sorted((ROOT / top).rglob("*.py"))
    if "rpc/v1" not in path.as_posix()
]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("top", ["operator", "worker"])
def test_source_roots_hold_packages_and_no_modules(top: str) -> None:
    # A module here would make `operator` importable from the root and break Python's own.
    assert not list((ROOT / top).glob("*.py"))


def test_no_link_leads_out_of_the_checkout() -> None:
    # One to a place outside, a shared .venv say, breaks every clone.
    tracked = git("ls-files", "--stage").splitlines()
    links = [line.split("\t")[1] for line in tracked if line.startswith("120000")]
    assert links == ["charts/cleave/files/crds"]
    assert (ROOT / links[0]).resolve() == ROOT / "crds"


def test_no_program_is_tracked() -> None:
    # Nobody can read one: executables and libraries of Linux, Windows and macOS, and Java's.
    magic = (b"\x7fELF", b"MZ", b"!<arch>", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe")
    tracked = [ROOT / path for path in git("ls-files").splitlines()]
    assert tracked
    assert not [path for path in tracked if path.is_file() and path.read_bytes().startswith(magic)]
    suffixes = {".pyc", ".whl", ".jar", ".deb", ".rpm", ".exe"}
    assert not [path for path in tracked if path.suffix in suffixes]


def test_the_standard_operator_module_is_not_shadowed() -> None:
    import operator

    assert operator.add(1, 1) == 2


def test_every_module_says_what_it_is() -> None:
    begin = re.compile(r'(#.*\n)*"""')
    assert [name(path) for path in SOURCES if not begin.match(path.read_text())] == []


def test_packages_hold_a_docstring_and_nothing_else() -> None:
    packages = [path for path in SOURCES if path.name == "__init__.py"]
    assert [name(p) for p in packages if len(ast.parse(p.read_text()).body) != 1] == []


def test_files_stay_one_noun_long() -> None:
    assert [name(path) for path in SOURCES if len(path.read_text().splitlines()) > 600] == []


def test_every_documented_module_and_test_exists() -> None:
    """docs/papers.md and ARCHITECTURE.md may name only what is there."""
    for page in ("docs/papers.md", "ARCHITECTURE.md"):
        text = (ROOT / page).read_text()
        for path in re.findall(r"`((?:operator|worker|tests|e2e|proto|docs)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page} names {path}"


def test_relative_links_in_documents_lead_somewhere() -> None:
    pages = git("ls-files", "*.md").split()
    for page in pages:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
