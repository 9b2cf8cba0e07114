"""Raises the limit of open files, and thus of connections. Called once, before the gateway serves.

Shells and containers often start with a soft limit of 1,024, far below the hard limit.
"""

import logging
import resource

log = logging.getLogger("cleave.gateway")

MAX_OPEN_FILES = 1 << 20
"""Some systems allow a billion, and some libraries iterate over all of them."""


def raise_open_file_limit(clients: int) -> None:
    """Raise the soft limit to the hard limit, also for processes that are forked later.

    `clients`: how many are to be served at a time; a warning is logged if the limit is too low for
    them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        limit = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        log.info("up to %d files may be open instead of %d", limit, soft)
    if resource.RLIM_INFINITY != limit <= clients:
        log.warning(
            "%d files may be open, too few for --max-clients %d and their engines: "
            "raise the hard limit (ulimit -Hn) or serve fewer clients",
            limit,
            clients,
        )
