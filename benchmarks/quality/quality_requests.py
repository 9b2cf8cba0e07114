"""The fixed set of requests: several kinds, and prompts of several lengths."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cleave.policy.kv_transfer_sample import make_random_prompt

ADAPTER, NAMED_TOOL = "adapter", "tool named"
"""Kinds of requests; the last one is not split."""
MODEL, ADAPTERS = "tiny", ("first", "second")
LENGTHS = {300: 20, 1000: 10, 3000: 4, 7900: 2}
"""Tokens of long prompts: how many there are."""
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_CHARACTERS_PER_TOKEN = 1.8
"""Of random words."""
_COUNTRIES = (
    *("France", "Spain", "Italy", "Japan", "Egypt", "Peru", "Kenya", "Norway", "India", "Cuba"),
    *("Greece", "Chile", "Ghana", "Poland", "Turkey", "Canada", "Nepal", "Ireland", "Iran", "Fiji"),
)
_TOPICS = (
    *("winter", "gravity", "bread", "the moon", "bicycles", "whales", "music", "money", "rivers"),
    *("friendship", "volcanoes", "chess"),
)
_OTHER_QUESTIONS = (
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "How do I boil an egg?",
    "What does a prime number look like?",
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
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Describe a {}.": {"name": _TEXT, "age": _NUMBER},
    "Where is the {}?": {"city": _TEXT, "country": _TEXT},
    "Is the {} ready?": {"ready": {"type": "boolean"}},
    "Rate the {}.": {"stars": {"enum": [1, 2, 3, 4, 5]}, "why": _TEXT},
}
_THINGS = ("dog", "house", "film", "lamp")


@dataclass(frozen=True)
class Case:
    """One request."""

    kind: str
    path: str
    body: dict[str, Any]
    prompt_tokens: int = 0
    """About; 0: few."""


def list_cases(output_tokens: int) -> list[Case]:
    """All requests."""
    common = {"model": MODEL, "max_tokens": output_tokens, "temperature": 0}
    common |= {"return_token_ids": True}
    chat = common | {"logprobs": True, "top_logprobs": 2}
    completion = common | {"logprobs": 2, "ignore_eos": True}
    cases = [*_list_chats(chat), *_list_forms(chat)]
    beginnings = [*_BEGINNINGS, *(f"The best thing about {topic} is" for topic in _TOPICS)]
    cases += [
        Case("continuation", _COMPLETION, completion | {"prompt": each}) for each in beginnings
    ]
    for tokens, count in LENGTHS.items():
        for seed in range(count):
            words = make_random_prompt(random.Random(seed), int(tokens * _CHARACTERS_PER_TOKEN))
            text = f"{words}\n{beginnings[seed % len(beginnings)]}"
            body = completion | {"prompt": text}
            cases.append(Case(f"about {tokens:,} tokens", _COMPLETION, body, tokens))
    return cases


def _list_chats(chat: dict[str, Any]) -> Iterator[Case]:
    """Questions, to the model and its adapters, and such with an answer before them."""
    questions = [f"What is the capital of {country}?" for country in _COUNTRIES]
    questions += [f"What is {n} plus {7 * n % 31}?" for n in range(12, 20)]
    questions += [f"Explain {topic} to a child." for topic in _TOPICS]
    questions += [f"Write two sentences about {topic}." for topic in _TOPICS]
    questions += _OTHER_QUESTIONS
    for question in questions:
        yield Case("question", _CHAT, chat | {"messages": [_say(question)]})
    for first, second in zip(questions[::2], reversed(questions[1::2]), strict=True):
        turns = [_say(first), _say("I cannot say.", "assistant"), _say(second)]
        yield Case("second turn", _CHAT, chat | {"messages": turns})
    for adapter in ADAPTERS:
        for question in questions[::4]:
            body = chat | {"model": adapter, "messages": [_say(question)]}
            yield Case(ADAPTER, _CHAT, body)


def _list_forms(chat: dict[str, Any]) -> Iterator[Case]:
    """Answers of a JSON schema, and calls of a tool whose arguments have one."""
    for question, properties in _SCHEMAS.items():
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema |= {"required": [*properties], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        function = {"name": "answer", "description": "Says it.", "parameters": schema}
        tools = {"tools": [{"type": "function", "function": function}]}
        named = {"tool_choice": {"type": "function", "function": {"name": "answer"}}}
        hint = _say(f"Call this tool: {json.dumps(function)}", "system")
        for thing in _THINGS:
            messages = [_say(question.format(thing))]
            body = chat | {"messages": messages}
            yield Case("JSON schema", _CHAT, body | {"response_format": form})
            yield Case("tool offered", _CHAT, body | tools | {"messages": [hint, *messages]})
            yield Case(NAMED_TOOL, _CHAT, body | tools | named)


def _say(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}
