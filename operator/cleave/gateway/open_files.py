"""How many files, and thus connections, a gateway may have open. Called once, before it serves.

Shells and containers often start with a soft limit of 1,024, far below what they may take.
"""

import logging
import resource

log = logging.getLogger("cleave.gateway")

MOST = 1 << 20
"""Some systems allow a billion, and there are libraries that go through all of them."""


def raise_limit(clients: int) -> None:
    """Take as many as the hard limit allows, for processes that are forked later, too.

    `clients`: how many are to be served at a time; the log says when there are too few files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        most = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        log.info("up to %d files may be open instead of %d", most, soft)
    if resource.RLIM_INFINITY != most <= clients:
        log.warning(
            "%d files may be open, too few for --max-clients %d and their engines: "
            "raise the hard limit (ulimit -Hn) or serve fewer clients",
            most,
            clients,
        )
