"""Prompts for engines with the tiny model, and what comes back."""

import itertools
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import httpx

from e2e.support.deployments import Deployment
from e2e.support.engine_keys import headers_for

CHUNK_TOKENS = 2048
"""What vLLM computes of prompts in one step on CPU."""
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 2
"""Of the tiny model: layers, keys and values, heads, their size, bytes of bfloat16."""
TIMEOUT_S = 120
OUTPUT_TOKENS = 12
_UNUSED_NUMBERS = itertools.count(100_000)


@dataclass(frozen=True)
class Case:
    """One request: a prompt of about so many tokens, sent one way."""

    number: int
    prompt_tokens: int
    chat: bool
    stream: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        # The tiny model's tokenizer merges common words only: a capital letter is a token.
        letters = random.Random(self.number).choices("BCDFGHJKLMNPQRSTVWXZ", k=self.prompt_tokens)
        text = f"{self.number}: {''.join(letters)}"
        prompt = (
            {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        )
        return (
            prompt
            | {
                "model": "tiny",
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})
        )


CASES = [
    Case(number, prompt_tokens, chat, stream)
    for number, (prompt_tokens, chat, stream) in enumerate(
        (prompt_tokens, chat, stream)
        for prompt_tokens in (20, 200, 1_000, 3_000, 500)
        for chat in (False, True)
        for stream in (False, True)
    )
]


def make_case(prompt_tokens: int, *, stream: bool = False) -> Case:
    """A completion with a prompt that engines do not have cached, from a test or from a failed
    attempt at one."""
    return Case(next(_UNUSED_NUMBERS), prompt_tokens, chat=False, stream=stream)


def renumber(cases: Iterable[Case]) -> list[Case]:
    """The same cases with such prompts."""
    return [replace(case, number=next(_UNUSED_NUMBERS)) for case in cases]


@dataclass(frozen=True)
class Answer:
    """What came back, and how."""

    tokens: list[int]
    prompt_tokens: int
    raw: str


def ask(url: str, case: Case) -> Answer:
    headers = headers_for(url)
    response = httpx.post(url + case.path, json=case.body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    if not case.stream:
        body = response.json()
        tokens = body["choices"][0]["token_ids"]
        return Answer(tokens, body["usage"]["prompt_tokens"], response.text)
    assert response.text.endswith("data: [DONE]\n\n")
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    tokens = [
        token
        for event in events
        for choice in event["choices"]
        for token in choice.get("token_ids") or []
    ]
    return Answer(tokens, events[-1]["usage"]["prompt_tokens"], response.text)


def metric(url: str, name: str) -> float:
    """Sum of all samples of one series."""
    lines = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def engine_url(deployment: Deployment, role: str) -> str:
    return deployment.instances()[f"tiny-{role}-0"].engine_url


def must_have_moved_all(detail: str) -> None:
    """Whether a KV self-test moved a prompt of more than one chunk, block by block."""
    found = re.search(r": (\S+) MB for (\S+) tokens in (\S+) s", detail)
    assert found, detail
    megabytes, tokens, seconds = (float(number.replace(",", "")) for number in found.groups())
    assert tokens > CHUNK_TOKENS, detail
    assert megabytes * 1e6 >= tokens * KV_BYTES_PER_TOKEN, detail
    assert seconds > 0, detail
