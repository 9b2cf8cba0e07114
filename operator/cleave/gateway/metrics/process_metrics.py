"""CPU time, memory and files of the processes of a gateway, under prometheus_client's names.

Its own collector lists a process's open files at each scrape, which takes 5 ms with ten thousand
connections. Linux has their number as the size of the folder (since 6.2).
"""

import os
import re
from pathlib import Path

from cleave.gateway.metrics.families import Family, build_counter, build_gauge

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BOOT_TIME = re.compile(rb"^btime (\d+)", re.M)
_MAX_FILES = re.compile(rb"^Max open files\s+(\d+)", re.M)


def measure_processes(pids: list[int]) -> list[Family]:
    """Of a process and its children together; shared memory counts in each. Limit and start are
    those of the first."""
    cpu_s = virtual = resident = files = 0.0
    for pid in pids:
        stat = _read_stat(pid)
        cpu_s += (stat[11] + stat[12]) / _TICKS_PER_S
        virtual += stat[20]
        resident += stat[21] * _PAGE_BYTES
        files += _count_files(pid)
    if len(pids) > 1:
        # Of children that have ended.
        first = _read_stat(pids[0])
        cpu_s += (first[13] + first[14]) / _TICKS_PER_S
    boot = _BOOT_TIME.search(Path("/proc/stat").read_bytes())
    limit = _MAX_FILES.search(Path(f"/proc/{pids[0]}/limits").read_bytes())
    started_s = _read_stat(pids[0])[19] / _TICKS_PER_S + (int(boot[1]) if boot else 0)
    gauges = (
        ("virtual_memory_bytes", "Virtual memory size in bytes.", virtual),
        ("resident_memory_bytes", "Resident memory size in bytes.", resident),
        (
            "start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            started_s,
        ),
        ("open_fds", "Number of open file descriptors.", files),
        ("max_fds", "Maximum number of open file descriptors.", int(limit[1]) if limit else 0),
    )
    text = "Total user and system CPU time spent in seconds."
    return [
        build_counter("process_cpu_seconds", text, [((), cpu_s)]),
        *(build_gauge(f"process_{name}", text, [((), value)]) for name, text, value in gauges),
    ]


def _read_stat(pid: int) -> list[int]:
    """The fields after the name, of which the first is a letter (0 here); zeros once it ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [0] * 22
    return [0, *map(int, text.rpartition(")")[2].split()[1:22])]


def _count_files(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))
    except OSError:
        return 0
