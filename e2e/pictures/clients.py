"""Traffic of a few minutes for the pictures: conversations whose rate and lengths change by phase.

Arrivals are independent of answers (Poisson). Each conversation repeats what was said before, so
that prompts find their beginnings in the engines' caches. Failures are counted, not raised: one
phase asks for more than the fleet can do.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp

_WORD_LETTERS = 3
"""And a blank: four characters, about one token of the emulated engine."""
_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the traffic; `share` of the whole time, `rate` in requests per second."""

    name: str
    share: float
    rate: float
    prompt_tokens: int
    """That a request adds to its conversation, on average."""
    output_tokens: int
    """On average."""


PHASES = (
    Phase("calm", 0.25, 4.0, 300, 60),
    Phase("a rush of long prompts", 0.15, 9.0, 1000, 30),
    Phase("calm", 0.1, 4.0, 300, 60),
    Phase("long answers", 0.2, 7.0, 60, 250),
    Phase("calm, an engine is lost, some KV is damaged", 0.3, 4.0, 300, 60),
)
"""What two prefill and three decode instances of OPT-13B on an A100 notice."""


class Clients:
    """Conversations of one model through one gateway, until `talk` returns."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._url, self._model, self._random = (
            f"{url}/v1/chat/completions",
            model,
            random.Random(seed),
        )
        self._idle: list[list[dict[str, str]]] = []
        """Conversations that wait for a next question."""
        self.outcomes: Counter[str] = Counter()
        """By HTTP status, or the name of an exception."""

    async def talk(self, duration_s: float, turns: int = 5) -> None:
        """Ask through all phases, and wait for the last answers; `turns` of a conversation."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            at = time.monotonic()
            for phase in PHASES:
                end = at + phase.share * duration_s
                while (at := at + self._random.expovariate(phase.rate)) < end:
                    await asyncio.sleep(at - time.monotonic())
                    group.create_task(self._ask(session, phase, turns))
                at = end

    async def _ask(self, session: aiohttp.ClientSession, phase: Phase, turns: int) -> None:
        draw = self._random
        goes_on = self._idle and draw.random() < 1 - 1 / turns
        talk = self._idle.pop(draw.randrange(len(self._idle))) if goes_on else []
        question = make_text(draw, round(draw.uniform(0.5, 1.5) * phase.prompt_tokens))
        talk.append({"role": "user", "content": question})
        tokens = round(draw.uniform(0.5, 1.5) * phase.output_tokens)
        body = {"model": self._model, "messages": talk, "max_tokens": tokens, "stream": True}
        try:
            async with session.post(self._url, json=body) as response:
                raw = (await response.read()).decode()
            self.outcomes[str(response.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
            return
        if response.status == 200 and len(talk) < 2 * turns:
            talk.append({"role": "assistant", "content": read_answer(raw)})
            self._idle.append(talk)


def make_text(draw: random.Random, tokens: int) -> str:
    """About `tokens` made-up words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=_WORD_LETTERS)) for _ in range(tokens))


def read_answer(events: str) -> str:
    """The text of a stream, as far as it came."""
    texts = []
    for event in events.split("\n\n"):
        data = event.removeprefix("data: ")
        if data.startswith("{"):
            choices = json.loads(data).get("choices") or [{}]
            texts.append(choices[0].get("delta", {}).get("content") or "")
    return "".join(texts)
