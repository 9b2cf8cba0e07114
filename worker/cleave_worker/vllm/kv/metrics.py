"""What hand-offs did, from the workers through vLLM's statistics to its /metrics page."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from cleave_worker.transfer.identity import Reason

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_EXPIRED = "expired"


class Transfers(KVConnectorStats):
    """Pulls and refusals since the last report; plain data, for it crosses processes."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Nothing has happened."""
        self.data = {"seconds": [], "bytes": 0, "ended": {}}

    def pulled(self, seconds: float, num_bytes: int) -> None:
        """One hand-off has gone well."""
        self.data["seconds"].append(seconds)
        self.data["bytes"] += num_bytes

    def refused(self, reason: Reason) -> None:
        """One hand-off came to nothing."""
        self._count(reason.value, 1)

    def expired(self, number: int) -> None:
        """So many held prompts were given up because nobody came."""
        if number:
            self._count(_EXPIRED, number)

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not self.data["seconds"] and not self.data["ended"]

    def aggregate(self, other: KVConnectorStats) -> "Transfers":
        """Add what others report."""
        self.data["seconds"].extend(other.data["seconds"])
        self.data["bytes"] += other.data["bytes"]
        for reason, number in other.data["ended"].items():
            self._count(reason, number)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        seconds = self.data["seconds"]
        return {
            "Pulled prompts": len(seconds),
            "Pulled MB": round(self.data["bytes"] / 1e6, 3),
            "Mean pull (ms)": round(1e3 * sum(seconds) / len(seconds), 3) if seconds else 0,
            **{f"Hand-offs lost: {reason}": n for reason, n in self.data["ended"].items()},
        }

    def clone_and_reset(self) -> "Transfers":
        """Hand out what has happened and start anew."""
        done = Transfers(self.data)
        self.reset()
        return done

    def _count(self, reason: str, number: int) -> None:
        ended = self.data["ended"]
        ended[reason] = ended.get(reason, 0) + number


class TransferMetrics(KVConnectorPromMetrics):
    """The same as Prometheus series."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: Any,  # noqa: ANN401
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = create_metric_per_engine(
            self._histogram_cls(
                name="cleave_kv_pull_seconds",
                documentation="From the question for a prompt's KV to its last byte.",
                buckets=_SECONDS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._bytes = create_metric_per_engine(
            self._counter_cls(
                name="cleave_kv_pulled_bytes",
                documentation="KV pulled from other engines.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        lost = self._counter_cls(
            name="cleave_kv_lost",
            documentation="Hand-offs that came to nothing, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        # All of them from the start: an alert needs a series that is zero.
        self._lost = {
            (engine, reason): lost.labels(*values, reason)
            for engine, values in per_engine_labelvalues.items()
            for reason in (*Reason, _EXPIRED)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one step reports."""
        for seconds in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        self._bytes[engine_idx].inc(transfer_stats_data["bytes"])
        for reason, number in transfer_stats_data["ended"].items():
            self._lost[engine_idx, reason].inc(number)
