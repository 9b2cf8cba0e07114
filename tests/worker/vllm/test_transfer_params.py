"""An engine refuses transfer parameters that would end it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.upstream.kv_transfer_params import (
    KV_REQUEST_PARAMS,
    build_pending_handoff,
    build_prefix_source_params,
)
from cleave.router.instance import Target
from cleave.shm.load_page import ENV
from cleave_worker.vllm.transfer_params import find_faults, refuse_malformed

HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 9,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}
"""As NIXL writes it."""
TARGET = Target("x", "h", 1, "http://h:1", "b", 0, kv_port=2, prefix_port=3)
MALFORMED: list[Any] = [
    *(0, 5, "x", "", [], [1], True, 1.5),
    {"do_remote_prefill": True},
    {"do_remote_prefill": 1},
    {"do_remote_decode": "yes"},
    {**HANDOFF, "remote_block_ids": []},
    {**HANDOFF, "remote_block_ids": [1]},
    {**HANDOFF, "remote_engine_id": []},
    {**HANDOFF, "remote_request_id": {}},
    {**HANDOFF, "remote_host": None},
    {**HANDOFF, "remote_port": "5600"},
    {**HANDOFF, "tp_size": None},
    {**HANDOFF, "remote_num_tokens": "9"},
    {"cleave": 7},
    {"prefix_source": []},
]


@pytest.mark.parametrize("params", MALFORMED, ids=str)
def test_what_a_connector_cannot_read_is_a_fault(params: Any) -> None:
    assert find_faults({"kv_transfer_params": params}).keys() == {"kv_transfer_params"}


def test_encoder_outputs_are_named_by_an_object() -> None:
    assert find_faults({"ec_transfer_params": 0}) == {
        "ec_transfer_params": "Expected `object | null`"
    }
    assert find_faults({"ec_transfer_params": {"a": {}}, "session_id": 7}) == {}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        HANDOFF,
        {**HANDOFF, "prompt_token_ids": [1], "later": object()},
        {"do_remote_prefill": False},
    ],
)
def test_what_connectors_write_is_none(params: Any) -> None:
    assert find_faults({"kv_transfer_params": params}) == {}


def test_what_gateways_write_is_none() -> None:
    for raw in (
        KV_REQUEST_PARAMS,
        build_prefix_source_params(TARGET),
        build_pending_handoff(TARGET, b"n"),
    ):
        assert find_faults({"kv_transfer_params": json.loads(bytes(raw))}) == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*HANDOFF, "cleave", "prefix_source"]), VALUES) | VALUES)
def test_any_value_is_judged_without_an_error(params: Any) -> None:
    for name, fault in find_faults({"kv_transfer_params": params}).items():
        assert name == "kv_transfer_params"
        assert fault


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_refuses_a_request_with_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = pytest.importorskip("vllm.sampling_params")
    from vllm.exceptions import VLLMValidationError

    kind = module.SamplingParams
    monkeypatch.setattr(kind, "_verify_extra_args", kind._verify_extra_args)
    monkeypatch.delenv(ENV, raising=False)
    refuse_malformed()
    kind(extra_args={"kv_transfer_params": 0})
    monkeypatch.setenv(ENV, "/dev/null")
    refuse_malformed()
    assert kind(extra_args={"kv_transfer_params": HANDOFF, "a": 1}).extra_args["a"] == 1
    for params in MALFORMED:
        with pytest.raises(VLLMValidationError, match="kv_transfer_params"):
            kind(extra_args={"kv_transfer_params": params})
    with pytest.raises(VLLMValidationError, match="64"):
        kind(extra_args={"a": 2**70})
