"""Runs the unit tests of changed modules; `make quick` runs it after the linters.

Tests mirror the tree (tests/repository/test_names.py), so the path of a module determines its
tests. `make test` runs all of them.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = "tests/repository"
_SOURCES = (("operator/cleave/", "tests/"), ("worker/cleave_worker/", "tests/worker/"))


def find_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files for changed files, by their paths from the root.

    For a module without a test file of the same name these are all of its folder.
    """
    tests = {ALWAYS}
    for path in changed:
        if not path.endswith(".py") or not (root / path).is_file():
            continue
        if path.startswith("tests/"):
            if Path(path).name.startswith("test_"):
                tests.add(path)
            continue
        for source, mirror in _SOURCES:
            if path.startswith(source):
                module = Path(mirror + path.removeprefix(source))
                own = sorted((root / module.parent).glob(f"test_{module.stem}*.py"))
                beside = sorted((root / module.parent).glob("test_*.py"))
                tests.update(each.relative_to(root).as_posix() for each in own or beside)
    return sorted(tests)


def list_changed(since: str) -> list[str]:
    """Files that differ from the commit `since`, including untracked ones."""
    differing = _git("diff", "--name-only", since)
    return [*differing, *_git("ls-files", "--others", "--exclude-standard")]


def _git(*args: str) -> list[str]:
    result = subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True)
    return result.stdout.splitlines()


def main() -> int:
    """Run pytest; the exit code is pytest's."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: make quick ARGS='--since main~3'"
    )
    parser.add_argument(
        "--since", metavar="COMMIT", help="default: HEAD, or its parent when nothing is changed"
    )
    args, options = parser.parse_known_args()
    changed = list_changed(args.since or "HEAD") or list_changed("HEAD~1")
    tests = find_tests(changed)
    sys.stdout.write(f"{len(changed)} files changed; testing {' '.join(tests)}\n")
    sys.stdout.flush()
    command = [str(ROOT / ".venv/bin/pytest"), "-q", "-m", "not vllm", *options, *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
