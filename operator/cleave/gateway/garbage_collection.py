"""Garbage collection in short steps: no step looks at all that lives long.

Run by `gateway.main`. A full collection looks at each object: 12 ms for what a gateway imports,
4 ms for 1,024 instances, 50 ms for thousands of connections, in which all requests stand still. So
what lives is frozen every second, which takes no time: reference counts free it as ever, and no
collection looks at it again. What is hard: garbage in a cycle that has been frozen stays. Requests
leave none; should anything else, everything is collected once what is frozen has doubled.
"""

import asyncio
import gc

THRESHOLDS = (1_000, 4, 1_000)
"""At most 5,000 young objects are looked at, in 2 ms."""
FREEZE_INTERVAL_S = 1.0
COUNT_INTERVAL_S = 60.0
"""Counting what is frozen takes a millisecond for 100,000 objects."""


async def collect_in_steps() -> None:
    """Until it is cancelled."""
    limit = _freeze_all()
    gc.set_threshold(*THRESHOLDS)
    while True:
        for _ in range(round(COUNT_INTERVAL_S / FREEZE_INTERVAL_S)):
            await asyncio.sleep(FREEZE_INTERVAL_S)
            gc.freeze()
        if gc.get_freeze_count() > limit:
            gc.unfreeze()
            gc.collect()
            limit = _freeze_all()


def _freeze_all() -> int:
    """Freeze what lives; how many objects may be frozen until everything is collected."""
    gc.freeze()
    return 2 * gc.get_freeze_count()
