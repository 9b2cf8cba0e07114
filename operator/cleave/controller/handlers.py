"""Where kopf and the operator meet: every watch feeds the index, and nothing else happens there.

Made by `main`. kopf finds, keeps and renews the watches; it is told to write nothing, to keep no
state in objects, and to handle no change itself, because decisions here follow from what is, not
from what has changed.
"""

from typing import Any

import kopf

from cleave.controller.controller import Controller
from cleave.controller.kube import KINDS
from cleave.controller.metrics import Metrics
from cleave.controller.sweep import WATCHED

_PAUSES_S = (0.5, 1.0, 2.0)


def registry(controller: Controller, metrics: Metrics) -> kopf.OperatorRegistry:
    """A handler for every kind that is watched."""

    async def told(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf's own
        manifest, kind = dict(event["object"]), str(event["object"]["kind"])
        metrics.events[kind, event["type"] or "LISTED"] += 1
        if event["type"] == "DELETED":
            controller.gone(manifest)
        else:
            controller.seen(manifest)

    handlers = kopf.OperatorRegistry()
    kopf.on.login(registry=handlers)(kopf.login_via_client)
    for watched in WATCHED:
        api = KINDS[watched.kind]
        group, _, version = api.version.rpartition("/")
        kopf.on.event(group, version, api.plural, id=watched.kind, registry=handlers)(told)
    return handlers


def settings() -> kopf.OperatorSettings:
    """kopf's settings: watch, and nothing else."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    # Which kinds there are is known; to watch for more would take further rights.
    chosen.scanning.disabled = True
    chosen.networking.enforce_retry_after = True
    # Of one request; a watch is begun anew for ever.
    chosen.networking.error_backoffs = _PAUSES_S
    chosen.queueing.exit_timeout = 0.5
    # `main` has things to do after kopf has ended.
    chosen.process.ultimate_exiting_timeout = None
    # Each event would be copied several times to find out what has changed, which nobody asks.
    chosen.persistence.diffbase_storage = _NoDifferences()
    chosen.persistence.progress_storage = _NoProgress()
    for watched in WATCHED:
        if watched.selector:
            api = KINDS[watched.kind]
            group, _, version = api.version.rpartition("/")
            chosen.watching.label_selectors[group, version, api.plural] = watched.selector
    return chosen


class _NoDifferences(kopf.DiffBaseStorage):
    """Keeps nothing of what objects were like."""

    def build(self, **_: Any) -> kopf.BodyEssence:  # noqa: ANN401
        """Nothing is compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:  # noqa: ANN401
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        """Nothing is kept."""


class _NoProgress(kopf.ProgressStorage):
    """Keeps nothing of how far handlers have come: there are none that could."""

    def fetch(self, **_: Any) -> kopf.ProgressRecord | None:  # noqa: ANN401
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:  # noqa: ANN401
        """Nothing is kept."""

    def purge(self, **_: Any) -> None:  # noqa: ANN401
        """Nothing is there."""

    def touch(self, **_: Any) -> None:  # noqa: ANN401
        """Objects are left as they are."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Nothing is in it."""
        return essence
