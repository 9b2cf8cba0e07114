"""The terms page: one small file through which the agent tells its engine how to schedule.

The agent writes it when the engine starts and at each change of role; the engine's scheduler looks
before each pass, which costs a fraction of a microsecond, and needs neither a thread nor a socket.
"""

import struct
from pathlib import Path
from typing import Self

from cleave.metrics.page import Page
from cleave.policy.admission import Admission
from cleave.policy.ordering import Order
from cleave_worker.scheduling.terms import Terms

ENV = "CLEAVE_TERMS_PAGE"
"""Environment variable that names the page to the engine."""

_BODY = struct.Struct("<7Q")


class TermsPage:
    """A terms page, opened for writing (agent) or reading (engine)."""

    def __init__(self, path: Path) -> None:
        self._page = Page(path, _BODY)
        self._seen = 0

    def write(self, terms: Terms) -> None:
        """The engine follows these from its next pass on."""
        self._page.write(
            terms.order,
            terms.prefill_sched_batch,
            terms.max_num_seqs,
            terms.max_num_batched_tokens,
            terms.long_prefill_token_threshold,
            terms.admission,
            terms.preemption_limit,
        )

    def news(self) -> Terms | None:
        """The terms, when they were written since the last look; else None."""
        version = self._page.version
        if version == self._seen or (values := self._page.read()) is None:
            return None
        self._seen = version
        order, batch, seqs, tokens, threshold, admission, preemptions = values
        return Terms(
            Order(order), batch, seqs, tokens, threshold, Admission(admission), preemptions
        )

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
