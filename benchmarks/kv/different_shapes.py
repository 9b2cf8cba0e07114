"""Hand-offs between real vLLM engines on CPU that spread the model differently.

Run from the root: `.venv/bin/python benchmarks/kv/different_shapes.py [--pairs tp2:tp1 pp2:pp2]
[--transfers Pull PerLayer]`. For each pair and time of transfer two engines with a tiny model,
started as the agent starts them; KV goes one way, then the other, and every prompt is sent to its
prefill engine alone as well. Except for Pull the decode engine is called first.
Takes four cores and up to 9 GiB. Exit code 1: a token differs, a prompt was computed twice, or a
hand-off was lost.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (".", "benchmarks")
sys.path[:0] = [str(ROOT / path) for path in PATHS]

import httpx  # noqa: E402
import overlapped_prefill  # noqa: E402
from result_table import show  # noqa: E402
from subprocesses import guarded  # noqa: E402

from cleave.api.engine import TransferMode  # noqa: E402
from cleave.local.tiny_model import TinyModelShape, build  # noqa: E402
from cleave.rpc.v1.agent_pb2 import Registration  # noqa: E402
from cleave_worker.agent.config import parse  # noqa: E402
from cleave_worker.agent.launch import Boot, build_engine_launch, find_free_port  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from e2e.support import handoffs  # noqa: E402
from e2e.support.deployments import until  # noqa: E402
from e2e.support.vllm_prompts import TIMEOUT_S, Case, ask, metric  # noqa: E402

PAIRS = ("tp2:tp1", "pp2:pp2", "pp2:tp2")
HOST = "127.0.0.1"
UP_S = 420
LONGEST_PROMPT = 1_500
MODEL = TinyModelShape(kv_heads=4)
SIZES = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size"}

Row = dict[str, object]


def main() -> None:
    """Print one row for each pair and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="such as tp2:tp1")
    parser.add_argument(
        "--way", choices=(Transport.SHARED_MEMORY, Transport.GLOO), default=Transport.SHARED_MEMORY
    )
    parser.add_argument(
        "--transfers",
        nargs="+",
        type=TransferMode,
        default=[TransferMode.PULL],
        help="such as PerLayer",
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    rows: list[Row] = []
    numbers = itertools.count(1000)
    with tempfile.TemporaryDirectory(prefix="cleave-kv-") as name:
        folder = Path(name)
        build(folder / "model", MODEL)
        for number, (pair, transfer) in enumerate(itertools.product(args.pairs, args.transfers)):
            own = folder / str(number)
            own.mkdir()
            with pair_up(pair, (args.way, transfer), folder / "model", own) as engines:
                for names, (source, decoding) in (
                    (pair, engines),
                    (":".join(reversed(pair.split(":"))), engines[::-1]),
                ):
                    prompts = list(itertools.islice(numbers, args.prompts))
                    found = ask_all(
                        source, decoding, prompts, follows=transfer is not TransferMode.PULL
                    )
                    extra_config = {"way": str(args.way), "transfer": str(transfer)}
                    rows.append({"prefill:decode": names} | extra_config | found)
    show({"pairs": rows}, args.output, 120, lambda _, value: str(value))
    sys.exit(any(row["wrong"] or row["computed twice"] or row["lost"] for row in rows))


@contextmanager
def pair_up(
    pair: str, how: tuple[str, TransferMode], model: Path, folder: Path
) -> Iterator[tuple[Registration, Registration]]:
    """Two engines that are ready, on two cores each; `how`: KV moves."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(engine(sizes, (2 * at, 2 * at + 1), how, model, folder))
            for at, sizes in enumerate(pair.split(":"))
        )
        for one in (first, second):
            until(lambda url=one.engine_url: is_up(url), UP_S, f"{pair} is up, see {folder}")
        yield first, second


@contextmanager
def engine(
    sizes: str, cores: tuple[int, int], how: tuple[str, TransferMode], model: Path, folder: Path
) -> Iterator[Registration]:
    """One engine, as an agent registers it; `sizes`: tp2, pp2, ..."""
    way, transfer = how
    kind, size = sizes[:2], int(sizes[2:])
    flags = ["--name", f"{sizes}-{cores[0]}", "--deployment", "unlike", "--role", "mixed"]
    flags += ["--model", str(model), "--served-model-name", "tiny", "--host", HOST]
    flags += ["--connector", "cleave", SIZES[kind], str(size), "--max-model-len", "4096"]
    flags += ["--transfer", transfer.lower()]
    manifest = handoffs.tiny_with_connector(model, way, checksums=True)
    arguments = manifest["spec"]["engine"]["args"]  # type: ignore[index]
    # Several chunks of most prompts.
    arguments += ["--max-num-batched-tokens", "512"]
    config = parse([*flags, "--", "--dtype", "float32", *arguments])
    boot = Boot(
        boot_id=config.name,
        engine_port=find_free_port(HOST),
        kv_port=find_free_port(HOST),
        load_page=folder / config.name,
        cores=cores[:size],
    )
    started = build_engine_launch(config, boot, os.environ)
    with guarded(started.argv, started.env, folder / f"{config.name}.log"):
        yield Registration(
            instance=config.name,
            boot_id=boot.boot_id,
            engine_url=f"http://{HOST}:{boot.engine_port}",
            kv_port=boot.kv_port,
        )


def is_up(url: str) -> bool:
    """Whether an engine serves."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S).is_success
    return False


def ask_all(
    prefill: Registration, decode: Registration, numbers: Sequence[int], *, follows: bool
) -> Row:
    """Every prompt split between the engines, then of the prefill engine alone."""
    source, decoding = prefill.engine_url, decode.engine_url
    cases = [
        Case(n, random.Random(n).randint(1, LONGEST_PROMPT), chat=False, stream=False)
        for n in numbers
    ]
    ran, moved = metric(decoding, handoffs.RAN), metric(decoding, PULLED)
    begun = time.monotonic()
    split = []
    for case in cases:
        called = f"{prefill.instance}-{case.number}"
        if follows:
            handoff = overlapped_prefill.promised(prefill, called)
            split.append(overlapped_prefill.follow((source, decoding), handoff, called, case, case))
        else:
            handoff = handoffs.prefill(source, case, called)
            split.append(handoffs.decode(decoding, case, handoff, called))
    seconds = time.monotonic() - begun
    ran = metric(decoding, handoffs.RAN) - ran
    alone = [ask(source, case).tokens for case in cases]
    until(lambda: not any(map(used, (source, decoding))), TIMEOUT_S, "all blocks are free")
    return {
        "prompts": len(cases),
        "wrong": sum(one != other for one, other in zip(split, alone, strict=True)),
        "computed twice": int(ran) - sum(map(len, split)),
        "lost": sum(handoffs.lost(decoding).values()) + sum(handoffs.lost(source).values()),
        "MB": round((metric(decoding, PULLED) - moved) / 1e6, 1),
        "s for a prompt": round(seconds / len(cases), 2),
    }


PULLED = "cleave_kv_pulled_bytes_total"


def used(url: str) -> float:
    """Share of an engine's blocks that are held; an idle engine updates it on a request."""
    ask(url, Case(0, 1, chat=False, stream=False))
    return metric(url, "vllm:kv_cache_usage_perc")


if __name__ == "__main__":
    main()
