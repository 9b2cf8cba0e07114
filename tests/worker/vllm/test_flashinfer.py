"""vLLM on GPUs starts without nvcc: nothing that it chooses by default compiles with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.launch import Boot, build_engine_launch

CHOICES = Path(__file__).parents[2] / "support" / "vllm_cuda_choices.py"
MODULE = "cleave_worker.vllm.api_server"
WITHOUT_NVCC = {**os.environ, "CUDA_HOME": "/nonexistent", "VLLM_LOGGING_LEVEL": "ERROR"}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def choices() -> dict[str, dict[str, object]]:
    """What an engine chooses, by compute capability, which an agent without nvcc starts.

    Once for all tests: to import vLLM takes 10 s of a core.
    """
    pytest.importorskip("vllm")
    config = AgentConfig(
        name="w",
        deployment="d",
        revision="r",
        role=3,
        model="m",
        served_model_name="m",
        engine="vllm",
        host="127.0.0.1",
        connector="cleave",
    )
    boot = Boot("boot", 8001, 5601, Path("/dev/null"), gpu=True)
    launch = build_engine_launch(config, boot, WITHOUT_NVCC)
    arguments = launch.argv[launch.argv.index(MODULE) + 1 :]
    done = subprocess.run(
        [sys.executable, CHOICES, *arguments],
        env=launch.env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_without_nvcc_engines_choose_no_kernels_that_it_compiles(
    choices: dict[str, dict[str, object]],
) -> None:
    for capability, first in (("9.0", "FLASH_ATTN_MLA"), ("10.0", "CUTLASS_MLA")):
        chosen = choices[capability]
        assert chosen["attention"][0] == "FLASH_ATTN"  # type: ignore[index]
        assert chosen["latent attention"][0] == first  # type: ignore[index]
        assert not [name for kernels in chosen.values() for name in _names(kernels)], chosen
        assert chosen["gated delta net"] == "triton"
        assert not chosen["sampler"]
        assert not chosen["deep_gemm"]
        assert not chosen["all-reduce"]


def test_engines_schedule_one_iteration_ahead_also_with_our_connector(
    choices: dict[str, dict[str, object]],
) -> None:
    """As `cleave.perf` prices them."""
    for chosen in choices.values():
        assert chosen["connector"] == "CleaveConnector"
        assert chosen["asynchronous scheduling"]
        assert chosen["iterations in flight"] == 2


def _names(kernels: object) -> list[str]:
    """Of FlashInfer's kernels among `kernels`."""
    listed = kernels if isinstance(kernels, list) else [str(kernels)]
    return [name for name in listed if "flashinfer" in name.lower() or "trtllm" in name.lower()]
