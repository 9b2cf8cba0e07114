"""The KV that a decode engine has pulled, as its `/metrics` counts it. Pure.

Read by the agent's self-test and by the gateway's witness. vLLM with NixlConnector, Cleave's own
connector and the emulated engine count under different names.
"""

import re
from dataclasses import dataclass

_PULLED_BYTES = re.compile(
    rb"^(?:vllm:nixl_bytes_transferred_sum|cleave_kv_pulled_bytes_total)\b.* (\S+)$", re.MULTILINE
)
_PULL_SECONDS = re.compile(
    rb"^(?:vllm:nixl_xfer_time_seconds_sum|cleave_kv_pull_seconds_sum)\b.* (\S+)$", re.MULTILINE
)
_PULLED_TOKENS = re.compile(
    rb'^vllm:prompt_tokens_by_source_total\{.*\bsource="external_kv_transfer".*\} (\S+)$',
    re.MULTILINE,
)
# Expired leases are the prefill side's: prompts that no engine has come for.
_FAILURES = re.compile(
    rb"^(?:vllm:nixl_num_failed_transfers_total|cleave_kv_lost_total)\b"
    rb'(?!.*\breason="expired").* (\S+)$',
    re.MULTILINE,
)
_BYTES_BY_TRANSPORT = re.compile(
    rb'^cleave_kv_pulled_bytes_total\{.*\btransport="([^"]+)".*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class PullCounters:
    """KV pulled from other engines since the engine started, summed over ranks."""

    num_bytes: float
    seconds: float
    num_tokens: float
    """Tokens of prompts that came with a handoff, whether or not its KV arrived."""
    num_failed: float
    """Failures. NixlConnector also counts failed handshakes and notifications. With either
    connector each rank counts its own failures."""
    transport: str = ""
    """The transport that carried most bytes; empty when the engine does not report it."""


def parse_pull_counters(page: bytes) -> PullCounters | None:
    """Return the counters of a page of metrics; None when the engine has none."""
    if not _PULLED_BYTES.search(page):
        return None
    return PullCounters(
        num_bytes=_sum(_PULLED_BYTES, page),
        seconds=_sum(_PULL_SECONDS, page),
        num_tokens=_sum(_PULLED_TOKENS, page),
        num_failed=_sum(_FAILURES, page),
        transport=_find_main_transport(page),
    )


def _find_main_transport(metrics: bytes) -> str:
    bytes_by_transport = [
        (float(value), transport.decode())
        for transport, value in _BYTES_BY_TRANSPORT.findall(metrics)
    ]
    num_bytes, transport = max(bytes_by_transport, default=(0.0, ""))
    return transport if num_bytes else ""


def _sum(pattern: re.Pattern[bytes], metrics: bytes) -> float:
    return sum(float(value) for value in pattern.findall(metrics))
