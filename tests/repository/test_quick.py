"""Which tests `make quick` runs for a change."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
_quick = runpy.run_path(str(ROOT / "scripts/quick.py"))
find_tests, ALWAYS = _quick["find_tests"], _quick["ALWAYS"]


def test_a_module_leads_to_its_own_tests() -> None:
    changed = ["operator/cleave/policy/role_flipping.py"]
    assert find_tests(changed) == ["tests/policy/test_role_flipping.py", ALWAYS]


def test_a_worker_module_leads_to_its_own_tests() -> None:
    changed = ["worker/cleave_worker/transfer/sharding.py"]
    assert "tests/worker/transfer/test_sharding.py" in find_tests(changed)


def test_a_module_without_tests_of_its_name_leads_to_those_beside_it() -> None:
    tests = find_tests(["operator/cleave/simulator/queues.py"])
    assert "tests/simulator/test_run.py" in tests


def test_a_changed_test_is_run_and_other_files_are_not() -> None:
    changed = ["tests/policy/test_dispatch.py", "README.md", "tests/conftest.py", "gone.py"]
    assert find_tests(changed) == ["tests/policy/test_dispatch.py", ALWAYS]
