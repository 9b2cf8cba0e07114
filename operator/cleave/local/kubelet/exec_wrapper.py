"""The last step before a pod's command: ties the process to the kubelet's lifetime, then execs.

Run as a script by `process.start_process` with the standard library alone. A fork hook
(`preexec_fn`) would run Python between fork and exec of a process with gRPC threads and can
deadlock; this runs after exec, and the death signal it sets survives the next one.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Exec `argv`. Exits with 127 when it cannot be executed, like a shell."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The kubelet may have died before the signal was set.
    if os.getppid() != parent:
        sys.exit("the kubelet has ended")
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the pod's own command, no shell wanted
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
