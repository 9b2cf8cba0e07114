"""Hand-offs between real vLLM engines on CPU: hundreds of prompts, and hundreds of faults.

Run from the root: `.venv/bin/python benchmarks/kv/faults.py [--ways gloo]`. A prefill and a decode
engine with a tiny model for each way that KV takes. First every prompt is asked through the gateway
and of one engine alone; then hand-offs are altered, given twice, given too late, cut off, and in
the end their owner is killed. Exit code 1: something was wrong.
"""

import argparse
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATHS = ("benchmarks", "e2e", "tests/worker/transfer")
sys.path[:0] = [str(ROOT / path) for path in PATHS]

import hand_offs  # noqa: E402
import httpx  # noqa: E402
from rows import show  # noqa: E402

from cleave.local.tiny_model import build  # noqa: E402
from cleave_worker.transfer.link import Way  # noqa: E402

from harness import Deployment, deployed, tiny_vllm, until  # noqa: E402
from vllm_cases import TIMEOUT_S, Case, ask, engine_url, metric  # noqa: E402

NIXL = "nixl"
WAYS = (Way.SHARED_MEMORY.value, Way.GLOO.value, NIXL)
UP_S = 420
LONGEST_PROMPT = 3_000
LATE, TWICE, KILLED = 20, 20, 20
TIMED_TOKENS, TIMED_ROUNDS = (500, 3_000), 15
SECONDS = {NIXL: "vllm:nixl_xfer_time_seconds"}
BYTES = {NIXL: "vllm:nixl_bytes_transferred_sum"}

Row = dict[str, object]


def main() -> None:
    """Print what was asked, what was given, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--faults", type=int, default=150, help="for each way but NIXL")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    prompts: list[Row] = []
    faults: list[Row] = []
    reasons: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="cleave-kv-") as name:
        folder = Path(name)
        build(folder / "model")
        for number, way in enumerate(args.ways):
            own = folder / str(number)
            own.mkdir()
            with deployed(manifest(folder / "model", way), own, UP_S) as vllm:
                prompts.append(ask_all(vllm, way, args.prompts))
                if way != NIXL:
                    tally = hurt(vllm, way, args.faults)
                    faults += tally.rows()
                    reasons += tally.reasons()
    found = {"prompts": prompts, "faults": faults, "reasons": reasons}
    show(
        {name: rows for name, rows in found.items() if rows},
        args.output,
        120,
        lambda _, value: str(value),
    )
    wrong = [row for row in prompts + faults if row["wrong"] or not row["all freed"]]
    wrong += [row for row in reasons if row["given"] != row["counted"]]
    sys.exit(1 if wrong else 0)


def manifest(model: Path, way: str) -> dict[str, object]:
    if way == NIXL:
        return tiny_vllm(model)
    return hand_offs.tiny_with_connector(model, way, checksums=False)


def ask_all(vllm: Deployment, way: str, count: int) -> Row:
    """Every prompt behind the gateway and of the prefill engine alone."""
    rng = random.Random(count)
    cases = [
        Case(1_000 + number, rng.randint(1, LONGEST_PROMPT), number % 2 == 0, number % 4 < 2)
        for number in range(count)
    ]
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    ran = metric(decoding, hand_offs.RAN)
    split = [ask(vllm.url, case).tokens for case in cases]
    # A token of output is a token run; every other one was computed anew.
    recomputed = metric(decoding, hand_offs.RAN) - ran - sum(len(tokens) for tokens in split)
    seconds = SECONDS.get(way, "cleave_kv_pull_seconds")
    pulls = metric(decoding, f"{seconds}_count")
    moved = metric(decoding, BYTES.get(way, "cleave_kv_pulled_bytes_total"))
    alone = [ask(source, case).tokens for case in cases]
    first_ms = {tokens: first_token_ms(vllm, tokens) for tokens in TIMED_TOKENS}
    return {
        "way": way,
        "prompts": count,
        "wrong": sum(one != other for one, other in zip(split, alone, strict=True)),
        "recomputed": int(recomputed),
        "all freed": freed(vllm),
        "MiB": round(moved / 2**20, 1),
        "ms a pull": round(1e3 * metric(decoding, f"{seconds}_sum") / max(1, pulls), 2),
        **{f"first token, {tokens}": f"{ms:.1f} ms" for tokens, ms in first_ms.items()},
    }


def first_token_ms(vllm: Deployment, prompt_tokens: int) -> float:
    """Median from the decode engine's request to its first token, KV pulled in between."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    found = []
    for number in range(TIMED_ROUNDS):
        case = Case(40_000 + prompt_tokens + number, prompt_tokens, chat=False, stream=False)
        handed = hand_offs.prefill(source, case, f"timed-{case.number}")
        begun = time.perf_counter()
        hand_offs.post(
            *(decoding, case, f"timed-{case.number}"), max_tokens=1, kv_transfer_params=handed
        )
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found)


def hurt(vllm: Deployment, way: str, count: int) -> "Tally":
    """So many faults of all kinds."""
    tally = Tally(vllm, way)
    cases = hand_offs.unseen(50_000)
    with ExitStack() as stack:
        talker = stack.enter_context(hand_offs.talking_nonsense())
        foreign = stack.enter_context(hand_offs.owning_other_kv())
        kinds = hand_offs.faults(talker, foreign) | {
            f"cut off after {size} bytes": hand_offs.Fault(
                "peer_lost", stack.enter_context(cutting(size))
            )
            for size in (0, 7, 90)
        }
        for _ in range(-(-(count - LATE - TWICE - KILLED) // len(kinds))):
            tally.add(hand_offs.give(vllm, kinds, cases))
    for several in (given_twice, given_late, given_up_by_the_dead):
        tally.add(several(vllm, cases))
    return tally


class Tally:
    """What came of the faults of one way."""

    def __init__(self, vllm: Deployment, way: str) -> None:
        self._vllm = vllm
        self._way = way
        self._given: dict[str, list[hand_offs.Given]] = {}
        self._before = hand_offs.lost(engine_url(vllm, "decode"))

    def add(self, several: Iterator[hand_offs.Given]) -> None:
        """Give them and keep what comes."""
        for given in several:
            self._given.setdefault(given.name, []).append(given)

    def rows(self) -> Iterator[Row]:
        """One for each kind of fault."""
        all_freed = freed(self._vllm)
        for name, several in self._given.items():
            yield {
                "way": self._way,
                "fault": name,
                "given": len(several),
                "wrong": sum(given.tokens != given.wanted for given in several),
                "reason": several[0].reason,
                "all freed": all_freed,
            }

    def reasons(self) -> Iterator[Row]:
        """One for each reason that faults were given for, or counted."""
        counted = hand_offs.lost(engine_url(self._vllm, "decode"))
        all_given = [given for several in self._given.values() for given in several]
        given = Counter(one.reason for one in all_given)
        for reason in sorted({*given, *counted}):
            yield {
                "way": self._way,
                "reason": reason,
                "given": given[reason],
                "counted": int(counted.get(reason, 0) - self._before.get(reason, 0)),
            }


def given_twice(vllm: Deployment, cases: Iterator[Case]) -> Iterator[hand_offs.Given]:
    """The second time there is nothing left to pull."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    for _ in range(TWICE):
        case = next(cases)
        wanted = ask(source, case).tokens
        handed = hand_offs.prefill(source, case, f"twice-{case.number}")
        hand_offs.decode(decoding, case, handed, f"once-{case.number}")
        tokens = hand_offs.decode(decoding, case, handed, f"twice-{case.number}")
        yield hand_offs.Given("given twice", "not_held", tokens, wanted)


def given_late(vllm: Deployment, cases: Iterator[Case]) -> Iterator[hand_offs.Given]:
    """After their leases."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    expired = hand_offs.lost(source).get("expired", 0)
    held = hold(source, cases, LATE)
    # Those of other faults may still expire, too: so all must be free.
    until(
        lambda: (
            hand_offs.lost(source).get("expired", 0) - expired >= LATE and hand_offs.is_free(vllm)
        ),
        TIMEOUT_S,
        "leases end",
    )
    for case, wanted, handed in held:
        tokens = hand_offs.decode(decoding, case, handed, f"late-{case.number}")
        yield hand_offs.Given("late", "not_held", tokens, wanted)


def given_up_by_the_dead(vllm: Deployment, cases: Iterator[Case]) -> Iterator[hand_offs.Given]:
    """Their owner is killed before anybody has pulled."""
    held = hold(engine_url(vllm, "prefill"), cases, KILLED)
    decoding = engine_url(vllm, "decode")
    engine = vllm.engine("tiny-prefill-0")
    for process in (*engine.children(recursive=True), engine):
        process.kill()
    for case, wanted, handed in held:
        tokens = hand_offs.decode(decoding, case, handed, f"dead-{case.number}")
        yield hand_offs.Given("owner killed", "peer_lost", tokens, wanted)
    until(lambda: answers(vllm), UP_S, "the prefill engine is there again")


def hold(
    source: str, cases: Iterator[Case], count: int
) -> list[tuple[Case, list[int], dict[str, Any]]]:
    """Prompts, their tokens and their hand-offs."""
    several = [next(cases) for _ in range(count)]
    wanted = [ask(source, case).tokens for case in several]
    return [
        (case, tokens, hand_offs.prefill(source, case, f"held-{case.number}"))
        for case, tokens in zip(several, wanted, strict=True)
    ]


def answers(vllm: Deployment) -> bool:
    with suppress(httpx.HTTPError, KeyError):
        return httpx.get(f"{engine_url(vllm, 'prefill')}/health", timeout=5).status_code == 200
    return False


def freed(vllm: Deployment) -> bool:
    """Whether both engines' memory is free, once the last lease has ended."""
    with suppress(AssertionError):
        until(lambda: hand_offs.is_free(vllm), TIMEOUT_S, "all blocks are free")
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
                    with reader, socket.create_connection(owner[-1], TIMEOUT_S) as there:
                        cut(reader, there, size)

        def change(own: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
            owner.append(tuple(own["cleave"]["addresses"][0]))
            return hand_offs.altered(own, addresses=[listening.getsockname()[:2]])

        threading.Thread(target=relay, daemon=True).start()
        yield change
        listening.shutdown(socket.SHUT_RDWR)


def cut(reader: socket.socket, there: socket.socket, size: int) -> None:
    """Pass on what comes from either side until the owner has said so much."""
    asked = threading.Thread(target=pump, args=(reader, there, 1 << 30), daemon=True)
    asked.start()
    pump(there, reader, size)
    for end in (reader, there):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    asked.join(TIMEOUT_S)


def pump(source: socket.socket, target: socket.socket, left: int) -> None:
    with suppress(OSError):
        while left and (part := source.recv(min(left, 1 << 16))):
            target.sendall(part)
            left -= len(part)


if __name__ == "__main__":
    main()
