"""What lies at the sources of LoRA adapters, so that each content has a name of its own in engines.

Used by `adapter_keeper`. Engines read a folder or branch at different times, and it may change
between: KV of an adapter must not be used for another content of the same source. So the engines'
name of an adapter contains what its worker has found there. A folder is read again every few
seconds, and a change is taken up once it has come to rest; a branch every few minutes.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cleave.policy.adapters import AdapterSource
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.weights import fingerprint, model_hub
from cleave_worker.agent.weights.loaded_weights import (
    NO_WEIGHTS,
    Weights,
    WeightsError,
    make_reader,
    run_reading,
)
from cleave_worker.agent.weights.weight_sources import WeightSource

_log = logging.getLogger(__name__)
_USE = "adapter"


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found at a source."""

    found: Weights
    check_s: float
    """When it is looked at again, by the caller's clock."""
    listing: tuple[fingerprint.FileState, ...] = ()
    """Files of the folder when it was looked at last."""


class AdapterContents:
    """The contents of one worker's adapters."""

    def __init__(self, config: AgentConfig, clock: Callable[[], float]) -> None:
        self._timing = config.timing
        self._clock = clock
        self._reader = make_reader(config, os.environ)
        self._known: dict[str, _Known] = {}
        """By source."""

    async def find(self, ordered: Sequence[AdapterSource]) -> dict[str, str]:
        """Return the digest of what is at each source; empty where that is not known, because there
        is nothing, or the engine reads it from elsewhere."""
        sources = {each.source for each in ordered}
        self._known = {source: self._known[source] for source in self._known.keys() & sources}
        for source in sources:
            known = self._known.get(source)
            if known is None or known.check_s <= self._clock():
                self._known[source] = await self._read_again(source, known)
        return {source: known.found.id for source, known in self._known.items()}

    @property
    def check_s(self) -> float | None:
        """When a source is looked at again; None: there is none."""
        return min((each.check_s for each in self._known.values()), default=None)

    async def fetch(self, adapter: AdapterSource) -> str:
        """Return where the engine is to load an adapter from: of a repository the folder with the
        commit that was found. Raises WeightsError."""
        known = self._known.get(adapter.source)
        commit = next((each.commit for each in known.found.sources), "") if known else ""
        if not commit:
            return adapter.source
        cache = model_hub.find_cache(os.environ)
        try:
            download = partial(model_hub.fetch_snapshot, adapter.source, commit, cache)
            return str(await asyncio.to_thread(download))
        except Exception as error:  # the library's errors differ by version
            fault = str(error).partition("\n")[0]
            raise WeightsError(f"{adapter.source}@{commit} is not downloaded: {fault}") from error

    async def has_changed(self, adapter: AdapterSource) -> bool:
        """Return whether a folder has other files than when it was read, or cannot be read."""
        known = self._known.get(adapter.source)
        before = known.found.sources[0].files if known and known.found.sources else ()
        return bool(before) and await self._list(adapter.source) != before

    async def _read_again(self, source: str, known: _Known | None) -> _Known:
        is_folder = source.startswith("/")
        timing = self._timing
        check_s = self._clock() + (timing.adapter_check if is_folder else timing.adapter_hub_check)
        listing = await self._list(source) if is_folder else ()
        if known is not None and is_folder:
            is_same = known.found.id and listing == known.found.sources[0].files
            # A folder is written in steps: what is read in between is not whole.
            if is_same or listing != known.listing:
                return replace(known, check_s=check_s, listing=listing)
        return _Known(await self._read(source), check_s, listing)

    async def _read(self, source: str) -> Weights:
        read = partial(self._reader.read, [WeightSource(_USE, source)])
        try:
            found = await run_reading(read, self._timing.adapter_load, lambda _: None)
        except WeightsError as error:
            _log.warning("adapter %s: %s", source, error)
            return NO_WEIGHTS
        return NO_WEIGHTS if found.fault else found

    async def _list(self, source: str) -> tuple[fingerprint.FileState, ...]:
        try:
            return await asyncio.to_thread(fingerprint.list_files, Path(source))
        except OSError:
            return ()
