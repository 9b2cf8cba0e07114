"""Processes that end with the script that started them. Used by kv/different_shapes.py."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cleave_worker.agent import subreaper

GRACE_S = 20


@contextmanager
def guarded(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    """A process and its descendants below a warden, which outlive not even a killed script."""
    command = [sys.executable, "-I", "-S", subreaper.__file__, "--agent", str(os.getpid())]
    command += ["--grace", str(GRACE_S), "--", *argv]
    with log.open("wb") as out:
        # A session of its own: Ctrl-C reaches the script only, which ends it in order.
        process = subprocess.Popen(
            command, env=dict(env), stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)
