"""Requests whose prompts repeat, for tests of a router that looks at caches."""

import random

from cleave.router.router import Router

MIXED = {"m1": "mixed", "m2": "mixed", "m3": "mixed"}
BYTES_PER_TOKEN = 4
OUTPUT_TOKENS = 100


def make_text(seed: int, tokens: int) -> bytes:
    """With a byte that closes it, as in JSON, so that whole blocks of it are cached."""
    return random.Random(seed).randbytes(tokens * BYTES_PER_TOKEN) + b"]"


def send(router: Router, text: bytes, model: str = "m", **request: object):
    tokens = len(text) // BYTES_PER_TOKEN
    return router.pick(model, tokens, OUTPUT_TOKENS, text=text, **request)


def first_instance(pick) -> str:
    return (pick.prefill or pick.decode).instance


def serve(router: Router, text: bytes, **request: object) -> tuple[str, float]:
    """(the instance that computes the prompt, tokens it computes) of a request that ends at once"""
    pick = send(router, text, **request)
    computed = round(pick._prefill_entry[2])
    router.observe_completion(pick, OUTPUT_TOKENS)
    router.release(pick)
    return first_instance(pick), computed


def add_queue(router: Router, name: str, tokens: int) -> None:
    """Let prompts wait there, since now."""
    instance = router.registry.instances[name]
    instance.in_flight.prompt.add(tokens)
    instance.in_flight.num_prompts += 1
    instance.in_flight.queue.head_started_ms = router._clock() * 1000
    router.registry.refresh(instance)
