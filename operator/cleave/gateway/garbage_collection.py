"""Garbage collection in short steps: no step looks at all that lives long.

Run by `gateway.main`. A full collection looks at each object: 12 ms for what a gateway imports,
4 ms for 1,024 instances, 50 ms for thousands of connections, in which all requests stand still. So
what lives is frozen every second, which takes no time: reference counts free it as ever, and no
collection looks at it again. What is hard: garbage in a cycle that has been frozen stays. Requests
leave none; should anything else, everything is collected once memory has grown beyond what clients
can make it. And Python counts objects that are made less those that are freed, of any age: while as
many connections end as begin no collection starts, and the next one looks at tens of thousands. So
the young ones are counted, and frozen earlier when they are many.
"""

import asyncio
import gc
import sys
import time

THRESHOLDS = (1_000, 4, 1_000)
"""At most 5,000 young objects are looked at, in 2 ms, ..."""
MAX_YOUNG = 5_000
"""... if there are no more of them."""
YOUNG_INTERVAL_S = 0.05
"""Counting so many takes 0.1 ms."""
FREEZE_INTERVAL_S = 1.0
COUNT_INTERVAL_S = 60.0
GROWTH = 4
"""Blocks of memory are counted, in 0.1 ms; counting frozen objects takes 5 to 12 ms."""


async def collect_in_steps() -> None:
    """Until it is cancelled."""
    gc.freeze()
    limit = GROWTH * sys.getallocatedblocks()
    gc.set_threshold(*THRESHOLDS)
    while True:
        frozen_at = count_at = time.monotonic()
        while (now := time.monotonic()) < count_at + COUNT_INTERVAL_S:
            if now > frozen_at + FREEZE_INTERVAL_S or _count_young() > MAX_YOUNG:
                gc.freeze()
                frozen_at = now
            await asyncio.sleep(YOUNG_INTERVAL_S)
        if sys.getallocatedblocks() > limit:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            limit = GROWTH * sys.getallocatedblocks()


def _count_young() -> int:
    return sum(len(gc.get_objects(generation)) for generation in (0, 1))
