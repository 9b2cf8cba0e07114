"""The identity of what an engine loads: found before its start, checked once it responds.

Called by the supervisor at each start of an engine, and by worker nodes. A repository of Hugging
Face is known by its commit, which the engine is then made to load; files by a fingerprint of their
content. Of what comes from elsewhere, such as object storage, only the name is known; `fault` says
so. Files may change while an engine loads them: `find_change` compares afterwards.
"""

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.weights import fingerprint, model_hub
from cleave_worker.agent.weights.fingerprint import Check, FileState
from cleave_worker.agent.weights.weight_sources import WeightSource, list_sources

_log = logging.getLogger(__name__)
_ID_DIGITS = 12
_MODELSCOPE = "VLLM_USE_MODELSCOPE"
T = TypeVar("T")


class WeightsError(RuntimeError):
    """What an engine loads cannot be read; one line with the reason."""


class _Cancelled(Exception):  # noqa: N818
    """The thread has to end."""


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A source as it was found."""

    source: WeightSource
    content: str
    """Equal for equal content."""
    fault: str = ""
    """Why the content is not known; empty: it is."""
    files: tuple[FileState, ...] = ()
    commit: str = ""
    """Of a repository that is loaded; empty: it is none, or its commit is not known."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What one start of an engine loads."""

    id: str = ""
    """Digest of all of it; empty: it loads nothing."""
    read_s: float = 0.0
    """When it was read, in seconds since 1970."""
    sources: tuple[ReadSource, ...] = ()

    @property
    def fault(self) -> str:
        """Why other weights could have the same id, one sentence; empty: they could not."""
        return next((each.fault for each in self.sources if each.fault), "")

    @property
    def pins(self) -> dict[str, str]:
        """Options that make the engine load the commits that were found."""
        return {
            each.source.pin: each.commit for each in self.sources if each.source.pin and each.commit
        }

    def describe(self) -> str:
        """What was found, for the log."""
        return ", ".join(f"{each.source.use} {each.content}" for each in self.sources)


NO_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads sources as one engine would."""

    env: Mapping[str, str]
    offline: bool
    loads_repositories: bool = True
    """False: it loads nothing but what is here, as an emulated engine."""

    def read(self, sources: Iterable[WeightSource], check: Check) -> Weights:
        """Read all sources. Blocks. Raises OSError, and what `check` raises."""
        read_s = time.time()
        found = (self._read_source(each, check) for each in sources)
        return build_weights(read_s, [each for each in found if each is not None])

    def find_change(self, before: Weights, check: Check) -> str:
        """Return what of it has changed since it was read, one sentence; empty: nothing, as far as
        that is known. Blocks. Raises OSError, and what `check` raises."""
        for each in before.sources:
            if not self._has_changed(each):
                continue
            now = self._read_source(each.source, check, is_loaded=True)
            if now is not None and not now.fault and now.content != each.content:
                return f"{each.source.name} has changed while it was loaded"
        return ""

    def _has_changed(self, before: ReadSource) -> bool:
        source = before.source
        if before.files:
            path = Path(source.name)
            # Of files that are gone only what was loaded is known.
            return _is_present(path) and fingerprint.list_files(path) != before.files
        # What is pinned is loaded as it was found.
        is_pinned = bool(source.pin and before.commit) or model_hub.is_commit(source.revision)
        return model_hub.is_repository(source.name) and not is_pinned

    def _read_source(
        self, source: WeightSource, check: Check, *, is_loaded: bool = False
    ) -> ReadSource | None:
        """None: it is not loaded. `is_loaded`: the engine has just read it."""
        path = Path(source.name)
        if _is_present(path):
            files = fingerprint.list_files(path)
            digest = fingerprint.compute_fingerprint(path, files, check)
            return ReadSource(source, digest, files=files)
        if source.is_file:
            return None
        commit = self._find_commit(source, offline=self.offline or is_loaded)
        if commit:
            pinned = commit if self.loads_repositories else ""
            return ReadSource(source, f"{source.name}@{commit}", commit=pinned)
        if not self.loads_repositories:
            return None
        revision = source.revision or model_hub.DEFAULT_REVISION
        name = f"{source.name}@{revision}" if model_hub.is_repository(source.name) else source.name
        return ReadSource(source, f"{name}?", f"the content of {name} is not known to Cleave")

    def _find_commit(self, source: WeightSource, *, offline: bool) -> str:
        is_elsewhere = self.env.get(_MODELSCOPE, "").strip().lower() in ("1", "true")
        if is_elsewhere or not model_hub.is_repository(source.name):
            return ""
        revision = source.revision or model_hub.DEFAULT_REVISION
        cache = model_hub.find_cache(self.env)
        return model_hub.find_commit(source.name, revision, cache, offline=offline)


def _is_present(path: Path) -> bool:
    """Whether there is a file or folder; a whole chat template is no name of one."""
    try:
        return path.exists()
    except OSError:
        return False


def make_reader(config: AgentConfig, env: Mapping[str, str]) -> WeightReader:
    """Return the reader for the engine of an agent with this environment."""
    is_vllm = config.engine == "vllm"
    # `launch` lets an engine with a folder download nothing.
    offline = not is_vllm or model_hub.is_offline(env) or Path(config.model).is_dir()
    return WeightReader(env, offline, loads_repositories=is_vllm)


async def read_weights(
    config: AgentConfig, env: Mapping[str, str], report: Callable[[float], None]
) -> Weights:
    """Read what the engine of an agent is about to load; `report`: see `run_reading`. Raises
    WeightsError."""
    sources = list_sources(config.model, config.engine_args)
    read = partial(make_reader(config, env).read, sources)
    weights = await run_reading(read, config.timing.start_timeout, report)
    if weights.id:
        seconds = time.time() - weights.read_s
        _log.info("weights %s, read in %.1f s: %s", weights.id, seconds, weights.describe())
    return weights


async def find_change(config: AgentConfig, env: Mapping[str, str], weights: Weights) -> str:
    """Return what has changed of the weights that an engine has loaded; empty: nothing. Raises
    WeightsError."""
    find = partial(make_reader(config, env).find_change, weights)
    return await run_reading(find, config.timing.start_timeout, lambda _: None)


def build_weights(read_s: float, found: Sequence[ReadSource]) -> Weights:
    """Return the identity of these sources together; without any there is none."""
    if not found:
        return NO_WEIGHTS
    text = json.dumps([[each.source.use, each.content] for each in found])
    digest = hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]
    return Weights(digest, read_s, tuple(found))


async def run_reading(
    read: Callable[[Check], T], timeout_s: float, report: Callable[[float], None]
) -> T:
    """Run a reading in a thread; `report` gets the share that is read, about each quarter of a
    second. Raises WeightsError, also when it takes longer than `timeout_s`."""
    ended, share = threading.Event(), [0.0]

    def check(now: float) -> None:
        if ended.is_set():
            raise _Cancelled
        share[0] = max(share[0], now)

    reading = asyncio.create_task(asyncio.to_thread(read, check))
    try:
        async with asyncio.timeout(timeout_s):
            while not (await asyncio.wait({reading}, timeout=0.25))[0]:
                report(share[0])
        return reading.result()
    except TimeoutError:
        raise WeightsError(f"its files were not read within {timeout_s:g} s") from None
    except OSError as error:
        raise WeightsError(f"its files cannot be read: {error}") from error
    finally:
        # The thread ends by itself, at its next piece.
        ended.set()
        reading.cancel()
