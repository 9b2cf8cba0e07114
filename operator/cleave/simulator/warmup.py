"""`python -m cleave.simulator.warmup [--caches]`: compiles the simulator before its first use.

Called when a development tree or an image is built, so that the first plan does not wait for it.
With --caches, before tests: also the code of traces with the blocks of prompts, which is otherwise
compiled when it is needed.
"""

import sys

import numpy as np

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import is_compiled, simulate
from cleave.simulator.trace import PromptBlocks, Trace


def warm_up(has_blocks: bool) -> None:
    """Compile unless the machine code is cached on disk."""
    if is_compiled(has_blocks):
        return
    print("cleave: compiling the simulator, once for this version (about 45 seconds)")  # noqa: T201
    engine = SimulatedEngine(EngineTiming(1.0, (1.0, 2.0), 0.0, (1.0, 1.0), (0.0,)), 64)
    one = np.ones(1, np.int64)
    blocks = PromptBlocks(16, np.array([0, 1]), np.zeros(1, np.int64), 1) if has_blocks else None
    trace = Trace(np.zeros(1), one, one, blocks=blocks)
    simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace)


if __name__ == "__main__":
    warm_up(has_blocks=False)
    if "--caches" in sys.argv[1:]:
        warm_up(has_blocks=True)
