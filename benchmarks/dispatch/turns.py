"""What a request costs the router by PrefixAware and by ShortestWait, in us of CPU time.

`python benchmarks/dispatch/turns.py`, half a minute; with `PYTHONPATH=FOLDER` the compiled modules
that `scripts/compile.py FOLDER` has written beside a copy of the package.

Of each request: reading its text from the parsed body, the pick, and the accounting at its end. The
policies alternate in one process, so that what else the machine does meets both. What is hard: a
request comes from a parser that has just read it; so each text is read once more before the clock
starts, or the time would be that of fetching it from memory.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from registrations import state

from cleave.api.enums import DispatchPolicy
from cleave.gateway.failover.retry_policy import pick_instances
from cleave.gateway.http.completion_request import CompletionRequest, parse_completion
from cleave.router import router as router_module
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick, RequestPhase, Router
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import run_at_once

POLICIES = (DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.PREFIX_AWARE)
FLEETS = {
    "8 mixed": [agent_pb2.ROLE_MIXED] * 8,
    "4 prefill, 4 decode": [agent_pb2.ROLE_PREFILL] * 4 + [agent_pb2.ROLE_DECODE] * 4,
}
KINDS = ("turns", "long turns", "new", "short")
"""Next turns of conversations with one system prompt of 2,000 bytes, of 6 KB on average, and of 41;
new prompts of 4 KiB; and those below a block."""
IN_FLIGHT = 8
CONVERSATIONS, TURNS = 60, 10
_BATCH = 10
"""Requests that are timed together: their texts fit the CPU's cache."""
_ALPHABET = "abcdefghijklmnopqrstuvwxyz    "
_rng = random.Random(7)


@dataclass(frozen=True, slots=True)
class Row:
    fleet: str
    gateways: int
    kind: str
    bytes: float
    """Mean length of the prompts' JSON."""
    shortest_wait_us: float
    prefix_aware_us: float


def measure(fleet: str, gateways: int, kind: str, rounds: int) -> Row:
    """The least CPU time of some rounds, by each policy."""
    routers = [_build_router(fleet, gateways, policy) for policy in POLICIES]
    running: list[deque[Pick]] = []
    for router in routers:
        if kind == "new":
            # Long enough to notice that nothing repeats.
            batches = [batch for _ in range(3) for batch in _list_batches(kind)]
            for request in (each for batch in batches for each in batch):
                router.release(pick_instances(router, request, None))
        short = next(_list_batches("short"))[:IN_FLIGHT]
        running.append(deque(pick_instances(router, request, None) for request in short))
    gc.collect()
    gc.freeze()
    least = [float("inf")] * len(POLICIES)
    for _ in range(rounds):
        batches = list(_list_batches(kind))
        spent = [0.0] * len(POLICIES)
        for number, batch in enumerate(batches):
            for at, router in enumerate(routers):
                us = _serve(router, batch, running[at])
                # The first turns are no next ones.
                spent[at] += us if number or "turns" not in kind else 0.0
        timed = batches[1:] if "turns" in kind else batches
        count = sum(map(len, timed))
        least = [min(before, us / count) for before, us in zip(least, spent, strict=True)]
    size = sum(len(each.fields["messages"]) for batch in timed for each in batch) / count
    gc.unfreeze()
    return Row(fleet, gateways, kind, size, *least)


def _serve(router: Router, batch: list[CompletionRequest], running: deque[Pick]) -> float:
    """CPU time of these requests' picks, and of the ends of as many older ones, us."""
    total = 0.0
    for at in range(0, len(batch), _BATCH):
        some = batch[at : at + _BATCH]
        for request in some:
            bytes(request.fields["messages"])
        start = time.process_time()
        for request in some:
            running.append(pick_instances(router, request, None))
            ended = running.popleft()
            router.release(ended, RequestPhase.PREFILL)
            router.observe_completion(ended, 100)
            router.release(ended)
        total += time.process_time() - start
    return total * 1e6


def _build_router(fleet: str, gateways: int, policy: DispatchPolicy) -> Router:
    registry = InstanceRegistry(policy)
    for number, role in enumerate(FLEETS[fleet]):
        name = f"i{number}"
        event = state(name, role)
        registry.on_event(name, event, 0.0)
        if gateways > 1:
            load = agent_pb2.LoadReport(
                boot_id=event.registration.boot_id,
                num_routers=gateways,
                kv_blocks_free=event.registration.kv_blocks_total,
            )
            registry.on_event(name, agent_pb2.WatchEvent(load=load), 0.0)
    return Router(registry, seed=1)


def _list_batches(kind: str) -> Iterator[list[CompletionRequest]]:
    """Requests of one round, those of all conversations at a time."""
    if kind in ("new", "short"):
        size = 4_096 if kind == "new" else 600
        for _ in range(TURNS):
            yield [_parse([_say("user", size)]) for _ in range(CONVERSATIONS)]
        return
    system, first = _say("system", 2_000), 36_000 if kind == "long turns" else 500
    chats = [[system, _say("user", first)] for _ in range(CONVERSATIONS)]
    for _ in range(TURNS + 1):
        yield [_parse(chat) for chat in chats]
        for chat in chats:
            chat += _say("assistant", 400), _say("user", 150)


def _say(role: str, size: int) -> dict[str, str]:
    return {"role": role, "content": "".join(_rng.choices(_ALPHABET, k=size))}


def _parse(messages: list[dict[str, str]]) -> CompletionRequest:
    body = {"model": "m", "messages": messages, "max_tokens": 100, "stream": True}
    return run_at_once(parse_completion(b"/v1/chat/completions", json.dumps(body).encode()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each, of which the least counts")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    args = parser.parse_args(arguments)
    print("interpreted" if router_module.__file__.endswith(".py") else "compiled")
    print("instances, gateways, prompts, bytes: ShortestWait, PrefixAware, difference")
    for fleet in FLEETS:
        for gateways in (1, 2):
            for kind in args.kinds:
                row = measure(fleet, gateways, kind, args.rounds)
                plain, aware = row.shortest_wait_us, row.prefix_aware_us
                figures = f"{plain:6.2f} {aware:6.2f} {aware - plain:+6.2f}"
                print(f"{fleet:20} {gateways} {kind:10} {row.bytes:8,.0f}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
