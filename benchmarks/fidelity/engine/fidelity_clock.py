"""vLLM's scheduler, which also notes each pass: when it began, how long it took, what was in it.

Loaded by vLLM itself (`--scheduler-cls`) in the process of an engine's scheduler. What is hard: a
pass is over for its engine only when the next one can begin; the scheduler's own work counts too.
"""

import os
import time
from pathlib import Path

from vllm.v1.core.sched.scheduler import Scheduler

FOLDER = "FIDELITY_PASSES"
"""Environment variable: the folder for one file per engine."""
PAUSE_S = 0.002
"""An engine that schedules again within this time has not been idle."""


class ClockedScheduler(Scheduler):
    """Writes a line per pass: begin_s and end_s by the monotonic clock, then what it held."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        folder = Path(os.environ[FOLDER])
        self._file = (folder / f"{os.getpid()}.csv").open("a", buffering=1)
        self._pending = None
        self._updated_s = 0.0

    def schedule(self, *args, **settings):
        now_s = time.monotonic()
        if self._pending:
            begin_s, what = self._pending
            end_s = now_s if now_s - self._updated_s < PAUSE_S else self._updated_s
            self._file.write(f"{begin_s:.6f},{end_s:.6f},{what}\n")
            self._pending = None
        output = super().schedule(*args, **settings)
        if output.total_num_scheduled_tokens:
            self._pending = now_s, ",".join(map(str, describe(output)))
        return output

    def update_from_output(self, *args, **settings):
        result = super().update_from_output(*args, **settings)
        self._updated_s = time.monotonic()
        return result

    def shutdown(self):
        super().shutdown()
        self._file.close()


def describe(output):
    """Prompt tokens, end^2 - start^2 of them, decoding requests, their contexts, blocks to pull.

    A single token of a prompt counts as a decoding request, as for the simulator.
    """
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    tokens = squares = batch = contexts = 0
    for request, count in output.num_scheduled_tokens.items():
        start = computed[request]
        if count == 1:
            batch += 1
            contexts += start + 1
        else:
            tokens += count
            squares += (start + count) ** 2 - start**2
    pulls = getattr(output.kv_connector_metadata, "reqs_to_recv", {})
    pulled = sum(len(blocks) for pull in pulls.values() for blocks in pull.local_block_ids)
    return tokens, squares, batch, contexts, pulled
