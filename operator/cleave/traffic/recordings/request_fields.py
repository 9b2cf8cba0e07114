"""Which field of a recorded request is what: tokens, time of arrival, failure. Decided by its name.

Called for every column of a CSV file and every field of a JSON object; fields inside others have
the names of both, `usage.prompt_tokens`. What is hard: tools name the same thing differently and
different things alike, so a name is known here only if it has one meaning in all of them.
Sources: the files of vLLM's and SGLang's benchmarks, aiperf, guidellm, OpenAI, Anthropic, Gemini,
LiteLLM, OpenRouter, Portkey, Cloudflare, Phoenix and Langfuse, and the traces of Azure, Mooncake,
BurstGPT, Vidur and Splitwise.
"""

import re
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple


class FieldRole(Enum):
    """What a field says about a request."""

    PROMPT = auto()
    OUTPUT = auto()
    PROMPT_PART = auto()
    """One of several counts whose sum is the prompt: Langfuse's usage details."""
    OUTPUT_PART = auto()
    SEPARATE = auto()
    """Tokens that a count beside it leaves out, as SEPARATE says."""
    ARRIVAL = auto()
    STATUS = auto()
    """A word or an HTTP status."""
    ERROR = auto()
    """Empty unless the request failed."""
    SUCCESS = auto()
    """False if the request failed."""
    KIND = auto()
    """Whether it is a request at all: logs of whole applications have spans and events, too."""
    TOKEN_UNIT = auto()
    REQUESTS = auto()
    """How many requests a line sums up."""
    MODEL = auto()
    """Which model the request was for."""
    HASHES = auto()
    BLOCK_TOKENS = auto()


class Field(NamedTuple):
    """A field with a known meaning."""

    path: str
    """Names from the outermost object on, with dots between."""
    role: FieldRole
    rank: int = 0
    """Of several arrivals the lowest is used."""
    unit_s: float | None = None
    """Seconds per unit of an arrival, as its name says; None: it does not."""

    @property
    def is_start(self) -> bool:
        """Whether it is when a request began, as in logs that are written when requests end."""
        return self.role is FieldRole.ARRIVAL and self.rank // _RANK_STEP == 1

    @property
    def parent(self) -> str:
        """The path of the object that has this field."""
        return self.path.rpartition(".")[0]


def list_words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


PROMPT_NAMES = list_words(
    """
    prompttokens inputtokens contexttokens prefilltokens requesttokens numprompttokens
    numinputtokens numprefilltokens nprompttokens prompttokencount inputtokencount inputlength
    inputlen inputlens inputsequencelength inputseqlen promptlength promptlen promptlens
    promptsize inputusage isl tokensprompt tokensin requnits
    """
)
"""In normalised form: lower-case letters and digits only."""
OUTPUT_NAMES = list_words(
    """
    outputtokens generatedtokens completiontokens decodetokens responsetokens generationtokens
    numoutputtokens numgeneratedtokens numcompletiontokens numdecodetokens numgenerationtokens
    completiontokencount outputtokencount outputlength outputlen outputlens outputsequencelength
    outputseqlen outputsize tokensize outputusage osl tokenscompletion tokensout resunits
    candidatestokencount
    """
)
_ARRIVAL_NAMES = (
    """arrival arrivals arrivaltime arrivaltimes arrivaltimestamp arrivalts arrivedat""",
    """requeststart requeststarttime requeststarttimestamp requesttimestamp receivedat submittedat
    starttime starttimes starttimestamp startts startedat start sentat""",
    """timestamp timestamps time ts datetime""",
    """created createdat createdtime createtime creationtime requestcreatedat loggingtime
    timegenerated""",
)
_RANK_STEP = 10
"""Above the depth of a field, which decides between names of one rank."""
_RANKS = {name: rank for rank, names in enumerate(_ARRIVAL_NAMES) for name in names.split()}


MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per block of Mooncake's traces, which do not state it (FAST 2025)."""


class PublishedFormat(NamedTuple):
    """Published traces whose names of columns leave units open."""

    name: str
    columns: frozenset[str]
    """Which it has in any case."""
    unit_s: float
    """Seconds per unit of `timestamp`."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    """Tokens per hash of a block."""


PUBLISHED_FORMATS = (
    PublishedFormat("Bailian", frozenset(("inputlength", "parentchatid")), 1.0, 16),
    PublishedFormat("Mooncake", frozenset(("inputlength",)), 1e-3),
    PublishedFormat("BurstGPT", frozenset(("requesttokens",)), 1.0),
)

_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec", "milli", "millis", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "usec", "micro", "micros", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nsec", "nano", "nanos", "nanosecond", "nanoseconds"), 1e-9),
}
_CLOCKS = frozenset(("unix", "epoch", "utc"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

SEPARATE = {
    "inputtokens": list_words(
        """
        cachereadinputtokens cachecreationinputtokens cachereadtokens cachecreationtokens
        """
    ),
    "prompttokencount": frozenset(("tooluseprompttokencount",)),
    "candidatestokencount": frozenset(("thoughtstokencount",)),
}
"""By the name of a count what it leaves out, if they are in one object: Anthropic's cached tokens,
Gemini's results of tools and its thoughts."""
_STATUS_NAMES = list_words(
    """
    status statuscode httpstatus httpstatuscode responsestatus responsestatuscode responsecode
    outcome finishreason
    """
)
_ERROR_NAMES = list_words(
    """
    error errors errormessage errormsg errorcode errorstr errortype exception failed failure
    cancelled canceled wascancelled wascanceled
    """
)
_SUCCESS_NAMES = frozenset(("success", "issuccess", "succeeded", "ok"))
_REQUESTS_NAMES = list_words(
    """
    nummodelrequests nrequests numrequests requestcount apirequests totalrequests
    successfulrequests
    """
)
_MODEL_NAMES = list_words("model modelname modelid requestmodel genairequestmodel")
_ROLES = {
    **dict.fromkeys(PROMPT_NAMES, FieldRole.PROMPT),
    **dict.fromkeys(OUTPUT_NAMES, FieldRole.OUTPUT),
    **dict.fromkeys(frozenset().union(*SEPARATE.values()), FieldRole.SEPARATE),
    **dict.fromkeys(_STATUS_NAMES, FieldRole.STATUS),
    **dict.fromkeys(_ERROR_NAMES, FieldRole.ERROR),
    **dict.fromkeys(_SUCCESS_NAMES, FieldRole.SUCCESS),
    **dict.fromkeys(_REQUESTS_NAMES, FieldRole.REQUESTS),
    **dict.fromkeys(_MODEL_NAMES, FieldRole.MODEL),
    "hashids": FieldRole.HASHES,
    "hashblocktokens": FieldRole.BLOCK_TOKENS,
}
_PAIRS = {
    ("usage", "input"): FieldRole.PROMPT,
    ("usage", "output"): FieldRole.OUTPUT,
    ("tokencount", "prompt"): FieldRole.PROMPT,
    ("tokencount", "completion"): FieldRole.OUTPUT,
}
"""Names that have one meaning only inside another."""
_OUTER_ROLES = {"type": FieldRole.KIND, "level": FieldRole.STATUS}
"""These names mean other things inside other fields."""


def normalize(name: str) -> str:
    """Its letters and digits, in lower case."""
    return "".join(filter(str.isalnum, name)).lower()


@lru_cache(10_000)
def classify_field(path: str) -> Field | None:
    """What the field of this path says; None: nothing that is known."""
    parts = path.split(".")
    if len(parts) > 1 and parts[-1] == "value":  # aiperf's {"value": 550, "unit": "tokens"}
        parts.pop()
    names = [normalize(part) for part in parts]
    name, parent = names[-1], names[-2] if len(names) > 1 else ""
    role = _find_role(name, parent)
    if role is None and not _ERROR_NAMES.isdisjoint(names[:-1]):
        role = FieldRole.ERROR
    return _classify_arrival(path, parts[-1]) if role is None else Field(path, role)


def _find_role(name: str, parent: str) -> FieldRole | None:
    if parent == "usagedetails" and "input" in name:
        return FieldRole.PROMPT_PART
    if parent == "usagedetails" and "output" in name:
        return FieldRole.OUTPUT_PART
    if parent == "metrics" and name == "outputtokencount":  # aiperf's, without reasoning
        return None
    if (parent, name) in _PAIRS:
        return _PAIRS[parent, name]
    if name == "unit":
        has_tokens = parent == "usage" or parent in PROMPT_NAMES | OUTPUT_NAMES
        return FieldRole.TOKEN_UNIT if has_tokens else None
    return _ROLES.get(name) or (None if parent else _OUTER_ROLES.get(name))


def _classify_arrival(path: str, name: str) -> Field | None:
    words = [word.lower() for word in _WORD.findall(name)]
    unit = _UNITS.get(words[-1]) if words else None
    if unit is not None:
        words.pop()
    base = "".join(word for word in words if word not in _CLOCKS)
    if not base and words:  # epoch_ms
        base = "timestamp"
    rank = _RANKS.get(base)
    if rank is None:
        return None
    return Field(path, FieldRole.ARRIVAL, _RANK_STEP * rank + path.count("."), unit)
