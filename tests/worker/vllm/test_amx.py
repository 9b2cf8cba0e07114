"""vLLM on CPU may use the processor's matrix registers."""

import logging
import os
import subprocess
import sys

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm import amx

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.platforms.cpu")

_ASK = """
import ctypes
from cleave_worker.vllm.amx import enable_amx

ARCH_PRCTL, GET_PERMISSION, TILE_DATA = 158, 0x1022, 1 << 18

def may_use_tiles():
    allowed = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(allowed)) == 0
    return bool(allowed.value & TILE_DATA)

before = may_use_tiles()
enable_amx()
print(before, may_use_tiles())
"""
"""Numbers of linux/arch/x86/include/uapi/asm/prctl.h and asm/fpu/types.h."""


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX tiles"
)
@pytest.mark.parametrize(
    ("env", "expected"), [({ENV: "/dev/null"}, "False True"), ({}, "False False")]
)
def test_tiles_are_lent_to_engines_of_agents(env: dict[str, str], expected: str) -> None:
    plain = {key: value for key, value in os.environ.items() if key != ENV}
    completed = subprocess.run(
        [sys.executable, "-c", _ASK], env=plain | env, capture_output=True, text=True, check=True
    )
    assert completed.stdout.split("\n")[-2] == expected


@pytest.mark.parametrize(("lent", "lines"), [(True, 0), (False, 1)])
def test_a_refusal_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lent: bool, lines: int
) -> None:
    monkeypatch.setenv(ENV, "/dev/null")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: lent)
    with caplog.at_level(logging.WARNING, logger=amx.__name__):
        amx.enable_amx()
    assert len(caplog.records) == lines
    assert "SIGILL" in caplog.text or lent
