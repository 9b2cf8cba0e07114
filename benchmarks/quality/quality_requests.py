"""The fixed set of requests: several kinds, and prompts of several lengths."""

import random
from dataclasses import dataclass
from typing import Any

from cleave.policy.kv_transfer_sample import make_random_prompt

MODEL = "tiny"
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_CHARACTERS_PER_TOKEN = 2.1
"""Of random words."""
_QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "What is 12 plus 30?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "How do I boil an egg?",
    "Write two sentences about winter.",
    "What does a prime number look like?",
    "Explain gravity to a child.",
    "Which planet is the largest?",
)
_BEGINNINGS = (
    "Once upon a time there was a fox who",
    "The three primary colors are red,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Water boils at",
)
_SCHEMAS = (
    ("Describe a dog.", {"name": {"type": "string"}, "age": {"type": "integer"}}),
    ("Describe a city.", {"city": {"type": "string"}, "country": {"type": "string"}}),
    ("Is the light on?", {"on": {"type": "boolean"}}),
    ("Rate the film.", {"stars": {"enum": [1, 2, 3, 4, 5]}, "why": {"type": "string"}}),
)


@dataclass(frozen=True)
class Case:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]


def list_cases(lengths: tuple[int, ...], output_tokens: int) -> list[Case]:
    """All requests; `lengths`: of the long prompts, in tokens."""
    common = {"model": MODEL, "max_tokens": output_tokens, "temperature": 0}
    common |= {"return_token_ids": True}
    chat = common | {"logprobs": True, "top_logprobs": 2}
    completion = common | {"logprobs": 2, "ignore_eos": True}
    cases = [
        Case("question", _CHAT, chat | {"messages": [_say(question)]}) for question in _QUESTIONS
    ]
    cases += [
        Case("continuation", _COMPLETION, completion | {"prompt": text}) for text in _BEGINNINGS
    ]
    for first, second in zip(_QUESTIONS[:6], _QUESTIONS[6:], strict=True):
        turns = [_say(first), _say("I cannot say.", "assistant"), _say(second)]
        cases.append(Case("second turn", _CHAT, chat | {"messages": turns}))
    for question, properties in _SCHEMAS:
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = chat | {"messages": [_say(question)], "response_format": form}
        cases.append(Case("JSON schema", _CHAT, body))
    for tokens in lengths:
        for seed in range(3):
            words = make_random_prompt(random.Random(seed), int(tokens * _CHARACTERS_PER_TOKEN))
            text = f"{words}\n{_BEGINNINGS[seed]}"
            kind = f"about {tokens} tokens"
            cases.append(Case(kind, _COMPLETION, completion | {"prompt": text}))
    return cases


def _say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}
