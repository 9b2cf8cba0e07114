"""Connects kopf's watches with the controller: every watch event goes into the cache.

Made by `main`. kopf lists, watches and reconnects. It is configured to write nothing, to keep no
state in objects and to run no change handlers, because reconciles are level-triggered: they follow
from the present state, not from changes.
"""

from typing import Any

import kopf

from cleave.controller.cluster.client import KINDS
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
    kopf.on.login(registry=handlers)(kopf.login_via_client)
    for watched_kind in WATCHED_KINDS:
        api = KINDS[watched_kind.kind]
        group, _, version = api.version.rpartition("/")
        kopf.on.event(group, version, api.plural, id=watched_kind.kind, registry=handlers)(on_event)
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
    for watched_kind in WATCHED_KINDS:
        if watched_kind.selector:
            api = KINDS[watched_kind.kind]
            group, _, version = api.version.rpartition("/")
            options.watching.label_selectors[group, version, api.plural] = watched_kind.selector
    return options


class _NoDifferences(kopf.DiffBaseStorage):
    """Stores no last-handled state of objects."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401
        """Return an empty essence: nothing is compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:  # noqa: ANN401
        """Return None: nothing is stored."""
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        """Store nothing."""


class _NoProgress(kopf.ProgressStorage):
    """Stores no progress of handlers, as there are no change handlers."""

    def fetch(self, **_: Any) -> kopf.ProgressRecord | None:  # noqa: ANN401
        """Return None: nothing is stored."""
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        """Store nothing."""

    def purge(self, **_: Any) -> None:  # noqa: ANN401
        """Do nothing: nothing is stored."""

    def touch(self, **_: Any) -> None:  # noqa: ANN401
        """Leave the object as it is."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return the object as it is."""
        return essence
