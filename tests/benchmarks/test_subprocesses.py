"""What benchmarks start ends with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from e2e.support.deployments import until

BOUND_S = 60
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FORKS = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
SCRIPT = """
import os, sys, time
from pathlib import Path
from subprocesses import guarded

with guarded([sys.executable, "-c", sys.argv[2]], os.environ, Path(sys.argv[1])):
    sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["its end", "SIGKILL"])
def test_engines_end_with_the_script_however_it_ends(tmp_path: Path, ending: str) -> None:
    log = tmp_path / "log"
    env = os.environ | {"PYTHONPATH": f"{BENCHMARKS}:{':'.join(sys.path)}"}
    command = [sys.executable, "-c", SCRIPT, str(log), FORKS]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as script:
        until(lambda: log.exists() and len(log.read_text().split()) == 2, BOUND_S, "both run")
        started = [int(pid) for pid in log.read_text().split()]
        try:
            if ending == "SIGKILL":
                script.send_signal(signal.SIGKILL)
            script.stdin.close()
            until(lambda: not any(map(psutil.pid_exists, started)), BOUND_S, "both have ended")
        finally:
            for pid in filter(psutil.pid_exists, started):
                os.kill(pid, signal.SIGKILL)
