"""Requests of a client that traces them."""

import httpx

PROMPT = "MARKER-PROMPT and some more words"
CLIENT = 0xC11E47
TRACEPARENT = f"00-{0xABCDEF:032x}-{CLIENT:016x}-01"


def send_marked_prompt(url: str, model: str, **headers: str) -> None:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n")
