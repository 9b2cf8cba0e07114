"""Prefills that a decode engine is promised and follows; and what was promised and does not come.

Used by faults.py and different_shapes.py where engines move KV while it is computed.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cleave.gateway.upstream.kv_transfer_params import (
    build_overlapped_prefill_params,
    build_pending_handoff,
)
from cleave.router.instance import Target
from cleave.rpc.engine_key import compute_kv_key
from cleave.rpc.v1.agent_pb2 import Registration

from e2e.support import handoffs
from e2e.support.deployments import Deployment
from e2e.support.vllm_prompts import Case, ask, engine_url

PREFILL = "tiny-prefill-0"


@dataclass(frozen=True)
class Promise:
    """What the decode engine gets, and the following request to the prefill engine."""

    reason: str
    """Why the decode engine computes the prompt anew; empty: it need not."""
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda handoff: handoff
    prompt: Callable[[Case, Case], Case | None] = lambda case, _: case
    """Own case and another one -> what is computed under the name, if anything."""


KINDS = {
    "kept": Promise(""),
    "of another prompt": Promise("prompt", prompt=lambda _, other: other),
    "never begun": Promise("not_held", prompt=lambda *_: None),
    "of another boot": Promise("boot", change=handoffs.of_other_boot),
    "of a dead peer": Promise(
        "peer_lost", lambda handoff: handoffs.altered(handoff, addresses=[("127.0.0.1", 1)])
    ),
    "without fields": Promise("malformed", lambda message: {**message, "cleave": {}}),
}


def can_be_followed(vllm: Deployment) -> bool:
    """Whether these engines move KV while it is computed."""
    return bool(vllm.instances()[PREFILL].kv_port)


def give_promise(
    vllm: Deployment, name: str, kind: Promise, case: Case, other: Case
) -> handoffs.Given:
    """The decode engine is called first, as a gateway does that expects a gain."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    expected = ask(source, case).tokens
    called = f"promised-{case.number}"
    handoff = kind.change(promised(vllm.instances()[PREFILL], called))
    prompt = kind.prompt(case, other)
    tokens = follow((source, decoding), handoff, called, case, prompt)
    return handoffs.Given(f"promise {name}", kind.reason, tokens, expected)


def follow(
    urls: tuple[str, str], handoff: dict[str, Any], called: str, case: Case, prompt: Case | None
) -> list[int]:
    """Tokens of the decode engine; `prompt`: what is computed under the name, if anything."""
    source, decoding = urls
    with ThreadPoolExecutor(1) as pool:
        decoded = pool.submit(handoffs.decode, decoding, case, handoff, called)
        if prompt:
            params = json.loads(bytes(build_overlapped_prefill_params(called.encode())))
            handoffs.post(source, prompt, called, max_tokens=1, kv_transfer_params=params)
        return decoded.result()


def promised(registration: Registration, name: str) -> dict[str, Any]:
    """A hand-off, as a gateway makes it, of a prefill that it will ask for under this name."""
    host = urlsplit(registration.engine_url).hostname or ""
    target = Target(
        *(registration.instance, host, 0, registration.engine_url, registration.boot_id, 0),
        kv_port=registration.kv_port,
        kv_key=compute_kv_key(registration.engine_key),
    )
    found: dict[str, Any] = json.loads(bytes(build_pending_handoff(target, name.encode())))
    return found
