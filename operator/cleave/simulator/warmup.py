"""`python -m cleave.simulator.warmup`: compiles the simulator before its first use.

Called when a development tree or an image is built, so that the first plan does not wait for it.
"""

import numpy as np

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import is_compiled, simulate
from cleave.simulator.trace import PromptBlocks, Trace


def warm_up() -> None:
    """Compile unless the machine code is cached on disk."""
    if is_compiled():
        return
    print("cleave: compiling the simulator, once for this version (about 30 seconds)")  # noqa: T201
    engine = SimulatedEngine(EngineTiming(1.0, (1.0, 2.0), 0.0, (1.0, 1.0), (0.0,)), 64)
    one = np.ones(1, np.int64)
    fleet = SimulatedFleet(mixed=(SimulatedPool(engine, 1),))
    for blocks in (None, PromptBlocks(16, np.zeros(2, np.int64), np.zeros(0, np.int64), 1)):
        simulate(fleet, Trace(np.zeros(1), one, one, blocks=blocks))


if __name__ == "__main__":
    warm_up()
