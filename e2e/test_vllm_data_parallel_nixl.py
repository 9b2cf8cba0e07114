"""Data-parallel ranks of vLLM that hand over with vLLM's own connector: `make e2e-vllm`."""

from pathlib import Path

import pytest

from e2e.support.vllm_prompts import Case
from e2e.test_vllm_data_parallel import check_handoffs, expected, sparse_model

__all__ = ["expected", "sparse_model"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_ranks_hand_over_to_ranks_with_nixl(
    sparse_model: Path,
    expected: dict[Case, list[int]],
    tmp_path: Path,
) -> None:
    check_handoffs(sparse_model, expected, tmp_path / "d", "Nixl")
