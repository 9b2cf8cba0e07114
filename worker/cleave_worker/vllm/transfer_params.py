"""Refuses malformed transfer parameters before vLLM's engine core takes them.

Loaded by vLLM (entry point `vllm.general_plugins`) in each of its processes; does nothing unless an
agent started the engine. vLLM passes what a request has in `kv_transfer_params` to its connector as
it is: with NIXL a number in place of an object, or an object that lacks a member, ends the engine
core, and with it all requests. Gateways remove what their clients send there
(docs/decisions/requests.md); this
is the second line, for all other callers.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from cleave.shm.load_page import ENV


class TransferParams(msgspec.Struct):
    """The members that NIXL's and Cleave's connectors read, and `output_processor` of vLLM 0.32."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_block_ids: list[list[int]] | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None
    remote_block_size: int | None = None
    remote_blocks_expiry_time: float | None = None
    remote_prefill_cached_tokens: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    transfer_mode: str | None = None
    cleave: dict[str, Any] | None = None
    prefix_source: dict[str, Any] | None = None


_PLACE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Where a connector pulls from: it looks all of them up when it has to."""


def refuse_malformed() -> None:
    """Check the extra arguments of every request in this process."""
    if ENV not in os.environ:
        return
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    verify = SamplingParams._verify_extra_args

    def verify_all(self: Any) -> None:  # noqa: ANN401
        verify(self)
        for name, fault in find_faults(self.extra_args).items():
            raise VLLMValidationError(f"{name}: {fault}", parameter=name)

    SamplingParams._verify_extra_args = verify_all


def find_faults(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with transfer parameters among a request's extra arguments, by their name."""
    faults = {}
    if fault := _find_fault(arguments.get("kv_transfer_params")):
        faults["kv_transfer_params"] = fault
    if not isinstance(arguments.get("ec_transfer_params"), dict | None):
        faults["ec_transfer_params"] = "Expected `object | null`"
    return faults


def _find_fault(given: object) -> str:
    try:
        params = msgspec.convert(given, TransferParams | None)
    except msgspec.ValidationError as error:
        return str(error)
    if params is None or not params.do_remote_prefill:
        return ""
    missing = [name for name in _PLACE if getattr(params, name) is None]
    if params.cleave is None and not params.remote_block_ids:
        missing.append("remote_block_ids")
    return f"do_remote_prefill needs {', '.join(missing)}" if missing else ""
