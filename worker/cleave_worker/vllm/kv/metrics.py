"""Statistics of KV transfers, from the workers through vLLM to its /metrics page."""

import itertools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import metrics

from cleave_worker.transfer.handoff import RefusalReason
from cleave_worker.transfer.transport import Transport

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_EXPIRED = "expired"
PREFIX_PULLED, PREFIX_MISSING = "pulled", "missing"
"""Outcomes of pulls from a prefix cache besides `RefusalReason`; missing: it had no block."""


class KvTransferStats(metrics.KVConnectorStats):
    """Pulls and refusals since the last report, as plain data that crosses processes."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Clear all counts."""
        self.data = {"seconds": {}, "bytes": {}, "ended": {}, "prefixes": {}}

    def record_pull(self, transport: Transport, seconds: float, num_bytes: int) -> None:
        """Count one pull of KV that succeeded."""
        self.data["seconds"].setdefault(transport.value, []).append(seconds)
        self._count("bytes", transport.value, num_bytes)

    def record_refusal(self, reason: RefusalReason) -> None:
        """Count one failed handoff."""
        self._count("ended", reason.value, 1)

    def record_prefix(self, outcome: str) -> None:
        """Count one attempt to pull a prefix; after all but one outcome it is computed."""
        self._count("prefixes", str(outcome), 1)

    def record_expired(self, number: int) -> None:
        """Count leases that expired before a consumer came."""
        if number:
            self._count("ended", _EXPIRED, number)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data[kind] for kind in ("seconds", "ended", "prefixes"))

    def aggregate(self, other: metrics.KVConnectorStats) -> "KvTransferStats":
        """Add the counts of another report."""
        for transport, seconds in other.data["seconds"].items():
            self.data["seconds"].setdefault(transport, []).extend(seconds)
        for kind in ("bytes", "ended", "prefixes"):
            for name, number in other.data[kind].items():
                self._count(kind, name, number)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a summary for vLLM's log."""
        seconds = list(itertools.chain.from_iterable(self.data["seconds"].values()))
        return {
            "Pulled prompts": len(seconds),
            "Pulled MB": round(sum(self.data["bytes"].values()) / 1e6, 3),
            "Mean pull (ms)": round(1e3 * sum(seconds) / len(seconds), 3) if seconds else 0,
            **{f"Failed handoffs: {reason}": n for reason, n in self.data["ended"].items()},
            **{f"Prefixes: {outcome}": n for outcome, n in self.data["prefixes"].items()},
        }

    def clone_and_reset(self) -> "KvTransferStats":
        """Return the counts and start again from zero."""
        done = KvTransferStats(self.data)
        self.reset()
        return done

    def _count(self, kind: str, name: str, number: int) -> None:
        counts = self.data[kind]
        counts[name] = counts.get(name, 0) + number


class KvTransferMetrics(metrics.KVConnectorPromMetrics):
    """The statistics as Prometheus metrics."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        seconds = self._histogram_cls(
            name="cleave_kv_pull_seconds",
            documentation="Time from the request for a prompt's KV to its last byte.",
            buckets=_SECONDS,
            labelnames=[*labelnames, "transport"],
        )
        pulled = self._counter_cls(
            name="cleave_kv_pulled_bytes",
            documentation="KV pulled from other engines.",
            labelnames=[*labelnames, "transport"],
        )
        failures = self._counter_cls(
            name="cleave_kv_lost",
            documentation="KV handoffs that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        prefixes = self._counter_cls(
            name="cleave_prefix_pulls",
            documentation="Attempts to pull the beginning of a prompt from another engine's cache.",
            labelnames=[*labelnames, "outcome"],
        )
        # All label values exist from the start, as an alert needs a series that is zero.
        self._seconds, self._bytes = (
            {
                (engine, transport): series.labels(*values, transport)
                for engine, values in per_engine_labelvalues.items()
                for transport in Transport
            }
            for series in (seconds, pulled)
        )
        self._failures = {
            (engine, reason): failures.labels(*values, reason)
            for engine, values in per_engine_labelvalues.items()
            for reason in (*RefusalReason, _EXPIRED)
        }
        self._prefixes = {
            (engine, outcome): prefixes.labels(*values, outcome)
            for engine, values in per_engine_labelvalues.items()
            for outcome in (PREFIX_PULLED, PREFIX_MISSING, *RefusalReason)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one report."""
        for transport, durations in transfer_stats_data["seconds"].items():
            for seconds in durations:
                self._seconds[engine_idx, transport].observe(seconds)
        for transport, num_bytes in transfer_stats_data["bytes"].items():
            self._bytes[engine_idx, transport].inc(num_bytes)
        for reason, number in transfer_stats_data["ended"].items():
            self._failures[engine_idx, reason].inc(number)
        for outcome, number in transfer_stats_data["prefixes"].items():
            self._prefixes[engine_idx, outcome].inc(number)
