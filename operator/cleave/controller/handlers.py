"""Connects kopf's watches with the controller: every watch event goes into the cache.

Made by `main`. kopf lists, watches and reconnects. It is configured to write nothing, to keep no
state in objects and to run no change handlers, because reconciles are level-triggered: they follow
from the present state, not from changes.
"""

from typing import Any

import kopf

from cleave.controller.cluster.client import KINDS, log_in
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.resync import WATCHED_KINDS

_BACKOFFS_S = (0.5, 1.0, 2.0)


def build_registry(controller: Controller, metrics: OperatorMetrics) -> kopf.OperatorRegistry:
    """Register an event handler for every kind that is watched."""

    async def on_event(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf's own
        manifest, kind = dict(event["object"]), str(event["object"]["kind"])
        metrics.events[kind, event["type"] or "LISTED"] += 1
        if event["type"] == "DELETED":
            controller.on_delete(manifest)
        else:
            controller.on_change(manifest)

    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(log_in)
    for kind in WATCHED_KINDS:
        kopf.on.event(*_get_resource(kind), id=kind, registry=handlers)(on_event)
    return handlers


def build_settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only, write nothing."""
    options = kopf.OperatorSettings()
    options.posting.enabled = False
    # The kinds are known; a scan for others would need further permissions.
    options.scanning.disabled = True
    options.networking.enforce_retry_after = True
    # Back-off of one request; a watch is retried forever.
    options.networking.error_backoffs = _BACKOFFS_S
    options.queueing.exit_timeout = 0.5
    # `main` still cleans up after kopf has ended.
    options.process.ultimate_exiting_timeout = None
    # Else kopf copies each event several times to compute a difference that is not used.
    options.persistence.diffbase_storage = _NoDifferences()
    options.persistence.progress_storage = _NoProgress()
    for kind, selector in WATCHED_KINDS.items():
        if selector:
            options.watching.label_selectors[_get_resource(kind)] = selector
    return options


def _get_resource(kind: str) -> tuple[str, str, str]:
    """Group, version and plural of a kind, as kopf takes them."""
    group, _, version = KINDS[kind].version.rpartition("/")
    return group, version, KINDS[kind].plural


class _NoDifferences(kopf.DiffBaseStorage):
    """Stores no last-handled state of objects: nothing is compared."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:  # noqa: ANN401
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        pass


class _NoProgress(kopf.ProgressStorage):
    """Stores no progress of handlers, as there are no change handlers."""

    def fetch(self, **_: Any) -> kopf.ProgressRecord | None:  # noqa: ANN401
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        pass

    purge = touch = store

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
