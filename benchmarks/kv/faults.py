"""Hand-offs between real vLLM engines on CPU: hundreds of prompts, and hundreds of faults.

Run from the root: `.venv/bin/python benchmarks/kv/faults.py [--ways gloo]`. A prefill and a decode
engine with a tiny model for each way that KV takes, and each time at which it is moved. First every
prompt is sent through the gateway and to one engine alone; then hand-offs are altered, given twice
or too late, cut off, and in the end their owner is killed. Exit code 1: something was wrong.
"""

import argparse
import itertools
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
PATHS = (".", "benchmarks")
sys.path[:0] = [str(ROOT / path) for path in PATHS]

import httpx  # noqa: E402
import overlapped_prefill  # noqa: E402
from result_table import show  # noqa: E402

from cleave.local.tiny_model import build  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from e2e.support import handoffs  # noqa: E402
from e2e.support.deployments import Deployment, deployed, tiny_vllm, until  # noqa: E402
from e2e.support.vllm_prompts import TIMEOUT_S, Case, ask, engine_url, metric  # noqa: E402

NIXL = "nixl"
OVER_NIXL = "cleave nixl"
"""Cleave's connector, where NIXL is vLLM's own."""
WAYS = (Transport.SHARED_MEMORY.value, Transport.GLOO.value, OVER_NIXL, NIXL)
UP_S = 420
LONGEST_PROMPT = 3_000
LATE, TWICE, KILLED = 20, 20, 20
TIMED_TOKENS, TIMED_ROUNDS = (500, 3_000), 15
SECONDS = {NIXL: "vllm:nixl_xfer_time_seconds"}
BYTES = {NIXL: "vllm:nixl_bytes_transferred_sum"}

AHEAD = 'cleave_gateway_handoffs_total{result="ahead"}'
TRANSFERS = ("Pull", "PerLayer", "PerChunk", "Push")
CLIENTS = 4

Row = dict[str, object]
Result = TypeVar("Result")


def main() -> None:
    """Print the request, the handoff and the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--transfers", nargs="+", choices=TRANSFERS, default=TRANSFERS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--faults", type=int, default=300, help="of all ways together")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of each engine")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    kinds = [
        (way, transfer)
        for way, transfer in itertools.product(args.ways, args.transfers)
        if way != NIXL or transfer == args.transfers[0]
    ]
    each = -(-args.faults // max(1, sum(way != NIXL for way, _ in kinds)))
    wrong = False
    with tempfile.TemporaryDirectory(prefix="cleave-kv-") as name:
        folder = Path(name)
        build(folder / "model")
        for number, (way, transfer) in enumerate(kinds):
            own = folder / str(number)
            own.mkdir()
            found: dict[str, list[Row]] = {}
            spec = manifest(folder / "model", way, transfer, args.tensor)
            with deployed(spec, own, UP_S) as vllm:
                try:
                    for title, rows in try_out(vllm, way, transfer, args.prompts, each):
                        found[title] = rows
                except httpx.TimeoutException as error:
                    wrong = True
                    sys.stderr.write(
                        f"{way}, {transfer}: {error.request.url} took longer than {TIMEOUT_S} s; "
                        "the rest of this way is left out\n"
                    )
            # At once: the whole takes long.
            show(found, args.output, 120, lambda _, value: str(value))
            wrong |= any(is_wrong(row) for rows in found.values() for row in rows)
    sys.exit(wrong)


def try_out(
    vllm: Deployment, way: str, transfer: str, prompts: int, faults: int
) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each table. Raises httpx.TimeoutException."""
    yield way, [ask_all(vllm, way, transfer, prompts)]
    if way != NIXL:
        tally = hurt(vllm, faults)
        yield "faults", list(tally.rows())
        yield "reasons", list(tally.reasons())


def is_wrong(row: Row) -> bool:
    """Whether a row reports a violation."""
    return bool(row.get("wrong")) or not row.get("all freed", True) or "missing" in row.values()


def manifest(model: Path, way: str, transfer: str, tensor: int) -> dict[str, Any]:
    found: dict[str, Any] = (
        tiny_vllm(model, engine={"connector": "Nixl"})
        if way == NIXL
        else handoffs.tiny_with_connector(
            model, NIXL if way == OVER_NIXL else way, checksums=False, transfer=transfer
        )
    )
    # What such an engine takes, in place of what is reserved for models of a usual size.
    found["spec"]["template"] = {"resources": {"limits": {"memory": "4Gi"}}}
    size = {"tensor": tensor}
    pools = [{"role": role, "parallelism": size} for role in ("prefill", "decode")]
    found["spec"]["placement"] = {"manual": pools}
    return found


def ask_all(vllm: Deployment, way: str, transfer: str, count: int) -> Row:
    """Every prompt behind the gateway and of the prefill engine alone."""
    rng = random.Random(count)
    cases = [
        Case(1_000 + number, rng.randint(1, LONGEST_PROMPT), number % 2 == 0, number % 4 < 2)
        for number in range(count)
    ]
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    ran = metric(decoding, handoffs.RAN)
    split = [answer.tokens for answer in together(partial(ask, vllm.url), cases)]
    # A token of output is a token run; every other one was computed anew.
    recomputed = metric(decoding, handoffs.RAN) - ran - sum(len(tokens) for tokens in split)
    seconds = SECONDS.get(way, "cleave_kv_pull_seconds")
    pulls = metric(decoding, f"{seconds}_count")
    moved = metric(decoding, BYTES.get(way, "cleave_kv_pulled_bytes_total"))
    ahead = metric(vllm.url, AHEAD)
    alone = [answer.tokens for answer in together(partial(ask, source), cases)]
    first_ms = {tokens: first_token_ms(vllm, tokens) for tokens in TIMED_TOKENS}
    return {
        "transfer": transfer if way != NIXL else "its own",
        "prompts": count,
        "followed": int(ahead),
        "wrong": sum(one != other for one, other in zip(split, alone, strict=True)),
        "recomputed": int(recomputed),
        "all freed": freed(vllm),
        "MiB": round(moved / 2**20, 1),
        "ms a pull": round(1e3 * metric(decoding, f"{seconds}_sum") / max(1, pulls), 2),
        **{f"ms to first, {tokens}": round(ms, 1) for tokens, ms in first_ms.items()},
    }


def first_token_ms(vllm: Deployment, prompt_tokens: int) -> float:
    """Median from the decode engine's request to its first token, KV pulled in between."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    found = []
    for number in range(TIMED_ROUNDS):
        case = Case(40_000 + prompt_tokens + number, prompt_tokens, chat=False, stream=False)
        handed = handoffs.prefill(source, case, f"timed-{case.number}")
        begun = time.perf_counter()
        handoffs.post(
            *(decoding, case, f"timed-{case.number}"), max_tokens=1, kv_transfer_params=handed
        )
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found)


def together(do: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """What comes of several at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(do, *arguments))


def hurt(vllm: Deployment, count: int) -> "Tally":
    """So many faults of all kinds, and a few more."""
    tally = Tally(vllm)
    cases = handoffs.make_cases()
    promises = overlapped_prefill.KINDS if overlapped_prefill.can_be_followed(vllm) else {}
    with ExitStack() as stack:
        talker = stack.enter_context(handoffs.talking_nonsense())
        foreign = stack.enter_context(handoffs.owning_other_kv())
        kinds = handoffs.faults(talker, foreign) | {
            f"cut off after {size} bytes": handoffs.Fault(
                "peer_lost", stack.enter_context(cutting(size))
            )
            for size in (0, 7, 90)
        }
        rounds = -(-(count - LATE - TWICE - KILLED) // (len(kinds) + len(promises)))
        tasks = [
            partial(give, vllm, *one, next(cases), next(cases))
            for _ in range(max(1, rounds))
            for give, several in (
                (handoffs.give_one, kinds),
                (overlapped_prefill.give_promise, promises),
            )
            for one in several.items()
        ]
        tally.add(together(lambda task: task(), tasks))
    for several in (given_twice, given_late, given_up_by_the_dead):
        tally.add(several(vllm, cases))
    return tally


class Tally:
    """What came of the faults of one way."""

    def __init__(self, vllm: Deployment) -> None:
        self._vllm = vllm
        self._given: dict[str, list[handoffs.Given]] = {}
        self._before = handoffs.lost(engine_url(vllm, "decode"))

    def add(self, several: Iterable[handoffs.Given]) -> None:
        """Give them and keep what comes."""
        for given in several:
            self._given.setdefault(given.name, []).append(given)

    def rows(self) -> Iterator[Row]:
        """One for each kind of fault."""
        all_freed = freed(self._vllm)
        for name, several in self._given.items():
            yield {
                "fault": name,
                "given": len(several),
                "wrong": sum(given.tokens != given.expected for given in several),
                "reason": several[0].reason,
                "all freed": all_freed,
            }

    def reasons(self) -> Iterator[Row]:
        """One for each reason that faults were given for, or counted."""
        counted = handoffs.lost(engine_url(self._vllm, "decode"))
        all_given = [given for several in self._given.values() for given in several]
        given = Counter(one.reason for one in all_given if one.reason)
        # Each rank counts, and calls it a layout when it is given the addresses of fewer.
        has_ranks = self._vllm.instances()[overlapped_prefill.PREFILL].tensor_parallel_size > 1
        for reason in sorted({*given, *counted}):
            yield {
                "reason": reason,
                "given": given[reason],
                "counted": (number := int(counted.get(reason, 0) - self._before.get(reason, 0))),
                "": "" if number == given[reason] or has_ranks else "missing",
            }


def given_twice(vllm: Deployment, cases: Iterator[Case]) -> Iterator[handoffs.Given]:
    """The second time there is nothing left to pull."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    for _ in range(TWICE):
        case = next(cases)
        expected = ask(source, case).tokens
        handed = handoffs.prefill(source, case, f"twice-{case.number}")
        handoffs.decode(decoding, case, handed, f"once-{case.number}")
        tokens = handoffs.decode(decoding, case, handed, f"twice-{case.number}")
        yield handoffs.Given("given twice", "not_held", tokens, expected)


def given_late(vllm: Deployment, cases: Iterator[Case]) -> Iterator[handoffs.Given]:
    """After their leases."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    expired = handoffs.lost(source).get("expired", 0)
    handoffs_held = hold(source, cases, LATE)
    # Those of other faults may still expire, too: so all must be free.
    until(
        lambda: (
            handoffs.lost(source).get("expired", 0) - expired >= LATE and handoffs.is_free(vllm)
        ),
        TIMEOUT_S,
        "leases end",
    )
    for case, expected, handed in handoffs_held:
        tokens = handoffs.decode(decoding, case, handed, f"late-{case.number}")
        yield handoffs.Given("late", "not_held", tokens, expected)


def given_up_by_the_dead(vllm: Deployment, cases: Iterator[Case]) -> Iterator[handoffs.Given]:
    """Their owner is killed before anybody has pulled."""
    handoffs_held = hold(engine_url(vllm, "prefill"), cases, KILLED)
    decoding = engine_url(vllm, "decode")
    engine = vllm.engine("tiny-prefill-0")
    for process in (*engine.children(recursive=True), engine):
        process.kill()
    for case, expected, handed in handoffs_held:
        tokens = handoffs.decode(decoding, case, handed, f"dead-{case.number}")
        yield handoffs.Given("owner killed", "peer_lost", tokens, expected)
    until(lambda: answers(vllm), UP_S, "the prefill engine is there again")


def hold(
    source: str, cases: Iterator[Case], count: int
) -> list[tuple[Case, list[int], dict[str, Any]]]:
    """Prompts, their tokens and their hand-offs."""
    several = [next(cases) for _ in range(count)]
    expected = [ask(source, case).tokens for case in several]
    return [
        (case, tokens, handoffs.prefill(source, case, f"held-{case.number}"))
        for case, tokens in zip(several, expected, strict=True)
    ]


def answers(vllm: Deployment) -> bool:
    with suppress(httpx.HTTPError, KeyError):
        return httpx.get(f"{engine_url(vllm, 'prefill')}/health", timeout=5).status_code == 200
    return False


def freed(vllm: Deployment) -> bool:
    """Whether both engines' memory is free, once the last lease has ended."""
    with suppress(AssertionError):
        until(lambda: handoffs.is_free(vllm), TIMEOUT_S, "all blocks are free")
        return True
    return False


Change = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None]


@contextmanager
def cutting(size: int) -> Iterator[Change]:
    """A relay before the owner that breaks the connection after so many bytes of its answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        owner: list[tuple[str, int]] = []

        def relay() -> None:
            with suppress(OSError):
                while True:
                    reader, _ = listening.accept()
                    with reader, socket.create_connection(owner[-1], TIMEOUT_S) as upstream:
                        cut(reader, upstream, size)

        def change(own: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
            owner.append(tuple(own["cleave"]["addresses"][0]))
            return handoffs.altered(own, addresses=[listening.getsockname()[:2]])

        threading.Thread(target=relay, daemon=True).start()
        yield change
        listening.shutdown(socket.SHUT_RDWR)


def cut(reader: socket.socket, upstream: socket.socket, size: int) -> None:
    """Pass on what comes from either side until the owner has said so much."""
    requests_pump = threading.Thread(target=pump, args=(reader, upstream, 1 << 30), daemon=True)
    requests_pump.start()
    pump(upstream, reader, size)
    for end in (reader, upstream):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    requests_pump.join(TIMEOUT_S)


def pump(source: socket.socket, target: socket.socket, left: int) -> None:
    with suppress(OSError):
        while left and (part := source.recv(min(left, 1 << 16))):
            target.sendall(part)
            left -= len(part)


if __name__ == "__main__":
    main()
