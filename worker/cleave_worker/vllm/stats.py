"""vLLM's door for load reports: a stat logger that stores every iteration in the load page.

Loaded by vLLM itself (entry point `vllm.stat_logger_plugins`) in its API server process; without
the environment variable that names a page it does nothing, so that vLLM alone is not changed by an
installed Cleave. vLLM reports after every step and once more when work ends or is aborted, so the
page is also right when the engine is idle.

What is hard: vLLM does not say how many prompt tokens wait. See `pending_prompt_tokens`.
"""

import os
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from cleave.metrics.load_page import ENV, Load, LoadPage

_SMOOTHING = 0.1
"""Weight of one more prompt in the mean."""


def pending_prompt_tokens(num_waiting: int, tokens_per_prompt: float) -> int:
    """Estimate of the prompt tokens accepted and not yet computed.

    Waiting requests times the recent mean of tokens computed here per prompt: tokens from the
    prefix cache or from another instance cost nothing and are left out, so the estimate is near
    zero on a decode instance. The rest of a prompt in the middle of chunked prefill is not seen.
    """
    return round(num_waiting * tokens_per_prompt)


class LoadPageStatLogger(StatLoggerBase):
    """Writes the page of one engine; further data-parallel engines are not counted."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ANN401
        path = os.environ.get(ENV)
        self._page = LoadPage(Path(path)) if path and engine_index == 0 else None
        self._cache_config = vllm_config.cache_config
        self._tokens_per_prompt = 0.0
        self._num_preemptions = 0

    def log_engine_initialized(self) -> None:
        """The KV cache is allocated: store what an idle engine has."""
        self._write(num_running=0, num_waiting=0, usage=0.0)

    def record(
        self,
        scheduler_stats: Any,  # noqa: ANN401
        iteration_stats: Any,  # noqa: ANN401
        mm_cache_stats: Any = None,  # noqa: ANN401, ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Store the state after one step; vLLM passes None for what it did not measure."""
        if self._page is None:
            return
        if iteration_stats is not None:
            self._num_preemptions += iteration_stats.num_preempted_reqs
            self._learn_prompt_length(
                iteration_stats.prompt_token_stats.computed,
                len(iteration_stats.time_to_first_tokens_iter),
            )
        if scheduler_stats is not None:
            self._write(
                num_running=scheduler_stats.num_running_reqs,
                # Deferred ones wait as well: for KV from another instance, for instance.
                num_waiting=scheduler_stats.num_waiting_reqs
                + scheduler_stats.num_skipped_waiting_reqs,
                usage=scheduler_stats.kv_cache_usage,
            )

    def _learn_prompt_length(self, computed_tokens: int, prompts: int) -> None:
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
        self._page.write(
            Load(
                num_running=num_running,
                num_waiting=num_waiting,
                pending_prompt_tokens=pending_prompt_tokens(num_waiting, self._tokens_per_prompt),
                kv_blocks_free=round(total * (1 - usage)),
                kv_blocks_total=total,
                num_preemptions=self._num_preemptions,
                kv_cache_usage=usage,
            )
        )
