"""Why an engine ended, out of what it said.

What is hard: a vLLM that dies says so in a hundred lines, of which the last is mostly noise (leaked
semaphores, a shutdown that is complete). The cause is the first line that names an error; what
comes within seconds of it follows from it. Errors of single requests come long before the end.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

CASCADE_S = 30.0
"""An engine is gone this long after what ends it, its processes' time to stop included."""

_LIMIT = 300
_RECORD = re.compile(r"^(?:\(\w+ pid=\d+\) )*(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ \[[^\]]*\] ?")
_FAULT = re.compile(
    r"^[\w.]+(?:Error|Exception): (?!\d+ validation error)|^Value error, "
    r"|\bdied unexpectedly\b|^[\w. ]+: error: "
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PWD|AUTH|CREDENTIAL", re.IGNORECASE)
_FOLDERS = {"PWD", "OLDPWD"}
_SECRET_OPTION = re.compile(r"--[\w-]*(?:token|key|secret|password)", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s]+@")
_SHORTEST_SECRET = 6
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class LastWords:
    """Of one engine, heard line by line. They go to status and conditions, so without secrets."""

    def __init__(
        self,
        env: Mapping[str, str],
        argv: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`env`, `argv`: of the engine; values of what is named like a secret are masked."""
        self._clock = clock
        stated = [
            value
            for name, value in env.items()
            if _SECRET.search(name) and name.upper() not in _FOLDERS
        ]
        secrets = {*stated, *_option_values(argv)}
        # Long ones first: one may begin with another.
        self._secrets = sorted(
            (value for value in secrets if len(value) >= _SHORTEST_SECRET), key=len, reverse=True
        )
        self._last = self._fault = ""
        self._fault_at = -CASCADE_S
        self._chained = False

    def hear(self, line: str) -> None:
        """One line of its output."""
        record = _RECORD.match(line)
        said = line[record.end() :] if record else line
        for secret in self._secrets:
            said = said.replace(secret, "***")
        said = _USER.sub("***@", said)
        said = said.strip()[:_LIMIT]
        if not said:
            return
        grave = record is None or record["level"] in {"ERROR", "CRITICAL"}
        if said.startswith(_CHAINED):
            self._chained = self._last == self._fault
        elif grave and _FAULT.search(said) and (self._chained or not self._is_recent()):
            self._fault, self._fault_at, self._chained = said, self._clock(), False
        self._last = said

    def tell(self) -> str:
        """The error it ended of, else the last it said; empty when nothing."""
        return self._fault if self._is_recent() else self._last

    def _is_recent(self) -> bool:
        return self._clock() - self._fault_at < CASCADE_S


def _option_values(argv: Sequence[str]) -> Iterator[str]:
    """Values of options that are named like secrets; --api-key of vLLM takes several."""
    is_secret = False
    for argument in argv:
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            is_secret = bool(_SECRET_OPTION.fullmatch(name))
            if is_secret and value:
                yield value
        elif is_secret:
            yield argument
