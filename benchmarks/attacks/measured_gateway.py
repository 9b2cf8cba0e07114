"""A gateway whose callbacks are measured: `python measured_gateway.py FILE ARGUMENTS`.

On SIGUSR1 it writes the longest callback since the last one to FILE. run.py starts it.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType

import uvloop

sys.path.append(str(Path(__file__).parents[2]))

from cleave.gateway import main as gateway

from tests.support.loop_blocks import BlockRecorder, MeasuredLoop, recorded_blocks


def main() -> int:
    """As the gateway's own."""
    file, *arguments = sys.argv[1:]
    with recorded_blocks() as recorder:
        signal.signal(signal.SIGUSR1, partial(write, Path(file), recorder))
        uvloop.run = partial(uvloop.run, loop_factory=partial(MeasuredLoop, recorder))
        return gateway.main(arguments)


def write(file: Path, recorder: BlockRecorder, *_: int | FrameType | None) -> None:
    worst = recorder.worst
    recorder.forget()
    text = json.dumps({"ms": worst.cpu_s * 1e3, "gc_ms": worst.gc_s * 1e3, "where": str(worst)})
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main())
