"""A vLLM stat logger that writes every iteration to the load page, which the agent reads.

Loaded by vLLM (entry point `vllm.stat_logger_plugins`) in its API server process. Without the
environment variable that names a page it does nothing, so installing Cleave alone does not change
vLLM. vLLM reports after every step, and once more when work ends or is aborted; so the page is also
current when the engine is idle.

vLLM does not count the prompt tokens that wait, see `estimate_pending_prompt_tokens`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import StatLoggerBase

from cleave.shm.load_page import ENV, LoadPage, LoadSnapshot

_SMOOTHING = 0.1
"""Weight of the newest prompt in the mean."""


def read_load_ms(connector_stats: Mapping[str, Any]) -> float:
    """ms for which all GPUs together copied KV back from host memory in one step, by what vLLM's
    connectors have counted: OffloadingConnector alone, or by name in MultiConnector."""
    own = connector_stats.get("OffloadingConnector", connector_stats)
    seconds = own.get("data", {}).get("vllm:kv_offload_load_time", {})
    return 1_000 * float(sum(seconds.values()))


def estimate_pending_prompt_tokens(num_waiting: int, tokens_per_prompt: float) -> int:
    """Estimate the prompt tokens that were accepted and not yet computed.

    Waiting requests times the recent mean of tokens computed per prompt. Tokens from the prefix
    cache or another instance cost nothing and are excluded, so a decode instance is near zero. The
    rest of a prompt in chunked prefill is not included.
    """
    return round(num_waiting * tokens_per_prompt)


class LoadPageStatLogger(StatLoggerBase):
    """Writes the load page of the API server's own engine, a data-parallel rank or the only one."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ANN401
        path, own = os.environ.get(ENV), vllm_config.parallel_config.data_parallel_index
        self._page = LoadPage(Path(path)) if path and engine_index == own else None
        self._cache_config = vllm_config.cache_config
        self._tokens_per_prompt = 0.0
        self._num_preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._num_gpus = vllm_config.parallel_config.world_size
        self._host_hits, self._host_load_ms = 0, 0.0

    def log_engine_initialized(self) -> None:
        """Write the load of an idle engine once the KV cache is allocated."""
        self._write(0, 0, 0.0)

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401
        iteration_stats: Any,  # noqa: ANN401
        mm_cache_stats: Any = None,  # noqa: ANN401, ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Write the state after one step; vLLM passes None for values it did not measure."""
        if self._page is None:
            return
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs
            prompts = len(iteration_stats.time_to_first_tokens_iter)
            computed = iteration_stats.prompt_token_stats.computed
            self._update_prompt_length(computed, prompts)
            if not self._cache_config.enable_prefix_caching:
                # An engine without prefix cache looks nothing up; its prompts are all computed.
                self._prefix_queries += computed
        if scheduler_stats is not None:
            cache = scheduler_stats.prefix_cache_stats
            if cache is not None and self._cache_config.enable_prefix_caching:
                self._prefix_queries += cache.queries
                self._prefix_hits += cache.hits
            if (found := scheduler_stats.connector_prefix_cache_stats) is not None:
                self._host_hits += found.hits_by_source.get(CacheHitSource.HOST, 0)
            if scheduler_stats.kv_connector_stats:
                load_ms = read_load_ms(scheduler_stats.kv_connector_stats)
                self._host_load_ms += load_ms / self._num_gpus
            # Skipped requests wait as well, for instance for KV from another instance.
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            running, usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            self._write(running, waiting, usage)

    def _update_prompt_length(self, computed_tokens: int, prompts: int) -> None:
        if not prompts:
            return
        mean = computed_tokens / prompts
        if self._tokens_per_prompt:
            weight = 1 - (1 - _SMOOTHING) ** prompts
            mean = weight * mean + (1 - weight) * self._tokens_per_prompt
        self._tokens_per_prompt = mean

    def _write(self, num_running: int, num_waiting: int, usage: float) -> None:
        if self._page is None:
            return
        total = self._cache_config.num_gpu_blocks or 0
        pending = estimate_pending_prompt_tokens(num_waiting, self._tokens_per_prompt)
        free = round(total * (1 - usage))
        snapshot = LoadSnapshot(
            num_running,
            num_waiting,
            pending,
            free,
            total,
            self._num_preemptions,
            usage,
            self._prefix_queries,
            self._prefix_hits,
            self._host_hits,
            self._host_load_ms,
        )
        self._page.write(snapshot)
