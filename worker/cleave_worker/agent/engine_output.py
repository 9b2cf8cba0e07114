"""Finds out from its output what a starting engine does, and why an engine ended.

Read by its process. A large model takes minutes to start; vLLM logs when a part of its start begins
or ends, and draws progress bars while it downloads, loads and captures. A vLLM that dies logs a
hundred lines, of which the last are mostly noise (leaked semaphores, a completed shutdown). The
cause is the first line with an error; what follows within seconds is a consequence. Errors of
single requests occur long before the end.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

CASCADE_S = 30.0
"""An engine has ended this long after its fatal error, including the stop of its processes."""

_LIMIT = 300
_RECORD = re.compile(r"^(?:\(\w+ pid=\d+\) )*(?P<level>[A-Z]+) \d\d-\d\d [\d:]+ \[[^\]]*\] ?")
_FAULT = re.compile(
    r"^[\w.]+(?:Error|Exception): (?!\d+ validation error)|^Value error, "
    r"|\bdied unexpectedly\b|^[\w. ]+: error: "
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PWD|AUTH|CREDENTIAL", re.IGNORECASE)
_NOT_SECRET = {"PWD", "OLDPWD"}
_SECRET_OPTION = re.compile(r"--[\w-]*(?:token|key|secret|password)", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s]+@")
_MIN_SECRET_LENGTH = 6
_QUOTE = re.compile(
    r"(?<!\w)(['\"])(?:[^'\"]*\s[^'\"]*|[^'\"]{80,})(?:\1(?!\w)|$)|\[(?:-?\d+,\s*){4,}.*"
)
"""What an error quotes, unless it is a name or a path: it may be a prompt, or tokens of one."""
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

_STAGES = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"^[\w.-]+\.(?:safetensors|bin|gguf): ", "downloads the model"),
        (r"^Fetching \d+ files: ", "downloads the model"),
        (r"^Starting to load model |^(?:Multi-thread l|L)oading .*: ", "loads weights"),
        (r"^Loading weights took |^Model loading took ", "has loaded weights"),
        (r"Dynamo bytecode transform time: |Compiling a graph for ", "compiles"),
        (r"KV cache size: ", "has allocated the KV cache"),
        (r"^Warming up model for the compilation", "compiles"),
        (r"^Capturing CUDA graphs", "captures CUDA graphs"),
        (r"^Graph capturing finished ", "has captured CUDA graphs"),
    )
)
"""What begins a line of vLLM 0.32, without its prefixes, and what the engine then does, in the
order of a start. Lines that match nothing, or an earlier stage, leave the last one."""
_WITHOUT_SHARE = 1
"""How many of the stages, from the first, have no share: each of the files that are downloaded side
by side has a bar of its own."""
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_SHARE = re.compile(r" (\d{1,3})%")
_SHARE_STEP = 10
"""Percent points between two reports: each is sent to all watchers of the agent."""


class StartStage:
    """The present stage of an engine's start. It only advances, although vLLM loads weights twice
    for a drafting model and draws several bars at a time: each change is written to a status."""

    def __init__(self) -> None:
        self._reached = -1, 0
        """Number of the stage, and the share in percent."""
        self.text = ""
        """Such as `loads weights, 40 %`; empty: not known. It contains nothing of the output but
        the number, so it needs no masking."""

    def feed(self, text: str) -> None:
        """Read a line, or a piece of one: progress bars are drawn again after `\\r`."""
        line = _PREFIX.sub("", text.rstrip("\r").rpartition("\r")[2]).strip()
        for number, (pattern, stage) in enumerate(_STAGES):
            if pattern.search(line):
                share = _SHARE.search(line) if number >= _WITHOUT_SHARE else None
                done = int(share[1]) // _SHARE_STEP * _SHARE_STEP if share else 0
                if (number, done) > self._reached:
                    self._reached = number, done
                    self.text = f"{stage}, {done} %" if 0 < done < 100 else stage
                return


class ExitReason:
    """The reason why one engine ended, as status and conditions show it: secrets are masked, and so
    is what errors quote."""

    def __init__(
        self,
        env: Mapping[str, str],
        argv: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`env`, `argv`: of the engine; values with names like secrets are masked."""
        self._clock = clock
        values = [
            value
            for name, value in env.items()
            if _SECRET.search(name) and name.upper() not in _NOT_SECRET
        ]
        secrets = {*values, *_find_secret_values(argv)}
        # Longest first, as one may be the prefix of another.
        self._secrets = sorted(
            (value for value in secrets if len(value) >= _MIN_SECRET_LENGTH), key=len, reverse=True
        )
        self._last = self._fault = ""
        self._fault_at = -CASCADE_S
        self._chained = False

    def feed(self, line: str) -> None:
        """Read one line of output."""
        record = _RECORD.match(line)
        text = line[record.end() :] if record else line
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _USER.sub("***@", text)
        text = _QUOTE.sub("...", text.strip()[:_LIMIT])
        if not text:
            return
        is_error = record is None or record["level"] in {"ERROR", "CRITICAL"}
        if text.startswith(_CHAINED):
            self._chained = self._last == self._fault
        elif is_error and _FAULT.search(text) and (self._chained or not self._is_recent()):
            self._fault, self._fault_at, self._chained = text, self._clock(), False
        self._last = text

    def describe(self) -> str:
        """Return the fatal error, else the last line; empty without output."""
        return self.fault or self._last

    @property
    def fault(self) -> str:
        """The fatal error; empty if none was written recently."""
        return self._fault if self._is_recent() else ""

    def _is_recent(self) -> bool:
        return self._clock() - self._fault_at < CASCADE_S


def _find_secret_values(argv: Sequence[str]) -> Iterator[str]:
    """Yield values of options with names like secrets; vLLM's --api-key takes several."""
    is_secret = False
    for argument in argv:
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            is_secret = bool(_SECRET_OPTION.fullmatch(name))
            if is_secret and value:
                yield value
        elif is_secret:
            yield argument
