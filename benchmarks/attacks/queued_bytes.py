"""What sockets of a port hold in the kernel: `python queued_bytes.py PORT`. run.py starts it.

Each second it prints the most so far, in bytes. A process of its own, on the attacker's core: the
list of sockets takes 100 ms once attacks have left thousands that are closed.
"""

import sys
import time


def main() -> None:
    """Until it is killed."""
    port, most = f":{int(sys.argv[1]):04X}", 0
    while True:
        time.sleep(1)
        most = max(most, count(port))
        print(most, flush=True)


def count(port: str) -> int:
    """Received and not read, and sent and not acknowledged."""
    size = 0
    with open("/proc/net/tcp") as lines:
        for line in lines:
            fields = line.split()
            if fields[1].endswith(port):
                size += sum(int(queue, 16) for queue in fields[4].split(":"))
    return size


if __name__ == "__main__":
    main()
