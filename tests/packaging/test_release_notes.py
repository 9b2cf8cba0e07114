"""The text of a release is its section of the changelog."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## Unreleased

- Later.

## 0.2.0 (2027-01-01)

### Gateway

- New.

## 0.1.0

- First.
"""


@pytest.fixture
def changelog(tmp_path: Path) -> Path:
    file = tmp_path / "CHANGELOG.md"
    file.write_text(CHANGELOG)
    return file


def write_notes(version: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "release-notes", version, file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("version", "notes"), [("0.2.0", "### Gateway\n\n- New."), ("0.1.0", "- First.")]
)
def test_notes_are_the_versions_section(changelog, version: str, notes: str) -> None:
    done = write_notes(version, changelog)
    assert (done.returncode, done.stdout.strip()) == (0, notes)


@pytest.mark.parametrize("version", ["0.3.0", "0.1", "0"])
def test_a_version_without_a_section_is_an_error_with_the_remedy(changelog, version: str) -> None:
    done = write_notes(version, changelog)
    assert done.returncode == 1
    assert 'give "## Unreleased" that name' in done.stderr


def test_the_release_is_made_with_them() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    written = workflow.index('scripts/release-notes "$VERSION" >build/notes.md')
    assert written < workflow.index("--notes-file build/notes.md")
