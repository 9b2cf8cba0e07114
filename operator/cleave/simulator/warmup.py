"""`python -m cleave.simulator.warmup`: compiles the simulator before its first use.

Called when a development tree or an image is built, so that the first plan does not wait for it.
"""

import numpy as np

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import is_compiled, simulate
from cleave.simulator.trace import Trace


def warm_up() -> None:
    """Compile unless the machine code is cached on disk. That of traces with the blocks of prompts
    is compiled when it is needed."""
    if is_compiled():
        return
    print("cleave: compiling the simulator, once for this version (about 30 seconds)")  # noqa: T201
    engine = SimulatedEngine(EngineTiming(1.0, (1.0, 2.0), 0.0, (1.0, 1.0), (0.0,)), 64)
    one = np.ones(1, np.int64)
    simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), Trace(np.zeros(1), one, one))


if __name__ == "__main__":
    warm_up()
