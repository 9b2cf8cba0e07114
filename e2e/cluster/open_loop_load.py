"""Open-loop requests at a rate, with lengths that a test declares."""

import asyncio
import json
import random
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

_TIMEOUT_S = 120
_SPREAD = 0.5
"""Sigma of the log-normal lengths: p90 is 1.67 means."""


@dataclass(frozen=True)
class Kind:
    """The load: req/s, and mean lengths in tokens."""

    rate: float
    prompt_tokens: float
    output_tokens: float


class Stream:
    """Open-loop traffic until the context is left; `kind` may be changed meanwhile."""

    def __init__(self, address: str, model: str, kind: Kind, seed: int = 1) -> None:
        self.kind = kind
        self.answered = 0
        self.failures: list[str] = []
        self._url = f"http://{address}/v1/completions"
        self._model = model
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while not self._over.is_set():
                tasks.create_task(self._ask(session))
                due_s += self._random.expovariate(self.kind.rate)
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        kind = self.kind
        body = {
            "model": self._model,
            "prompt": [self._random.randrange(1000) for _ in range(self._draw(kind.prompt_tokens))],
            "max_tokens": self._draw(kind.output_tokens),
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with session.post(self._url, data=json.dumps(body)) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failures.append(repr(error))
            return
        if answer.status == 200 and '"error"' not in text and text.strip().endswith("[DONE]"):
            self.answered += 1
        else:
            self.failures.append(f"{answer.status} ...{text[-300:]}")

    def _draw(self, mean: float) -> int:
        value = mean * self._random.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        return max(1, min(round(value), 1000))
