"""What it takes to go on with a stream whose engine is lost, on vLLM's own engines on CPU.

Run from the root: `.venv/bin/python benchmarks/recovery/run.py`. Two mixed instances with
checkpoints. One makes a stream and stops in the middle of it; the other is called to go on
in three ways, with the same tokens: anew; where the prompt is in its prefix cache, as after going
back to who computed it; and from the stopped engine's checkpoints. Then streams run through the
gateway and an engine is killed: their tokens must be those of undisturbed runs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cleave.local import tiny_model

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

from result_table import show

from e2e.support.deployments import Deployment, deployed, tiny_vllm
from e2e.support.engine_keys import headers_for

SHAPE = tiny_model.TinyModelShape(layers=8, hidden=512, heads=8, kv_heads=4, mlp=1024)
LENGTHS = (512, 1024, 2048, 3072)
WRITER, READER = "tiny-mixed-0", "tiny-mixed-1"
AFTER = 8
"""Tokens made after going on; compared."""
FLUSH_S = 0.5
MOST_TOKENS = 4000
BOUND_S = 120.0
WAYS = ("anew", "returned", "restored")

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of an engine that goes on."""

    first_ms: float
    """From the question to the first token."""
    tokens: tuple[int, ...]


class WrongTokenError(Exception):
    """An answer differs from an undisturbed one."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--made", type=int, default=256, help="tokens until the engine is lost")
    parser.add_argument("--streams", type=int, default=6, help="that a killed engine takes along")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = run(Path(folder), args.rounds, args.made, args.streams)
    show(tables, args.output, 120, text)


def run(folder: Path, rounds: int, generated: int, streams: int) -> dict[str, list[Row]]:
    """Rows by table."""
    model, checkpoint_folder = folder / "model", Path("/dev/shm") / f"cleave-bench-{os.getpid()}"
    tiny_model.build(model, SHAPE)
    try:
        with deployed(build_manifest(model, checkpoint_folder), folder, 600) as deployment:
            lengths = [measure(deployment, tokens, generated, rounds) for tokens in LENGTHS]
            return {"going on, by prompt": lengths, "kills": [kill(deployment, generated, streams)]}
    finally:
        shutil.rmtree(checkpoint_folder, ignore_errors=True)


def build_manifest(model: Path, checkpoint_folder: Path) -> dict[str, object]:
    """Two mixed instances that keep checkpoints."""
    settings = {"kv_connector_extra_config": {"checkpoints": {"folder": str(checkpoint_folder)}}}
    engine = {"connector": "Cleave", "args": ["--kv-transfer-config", json.dumps(settings)]}
    pools = [{"role": "mixed", "replicas": 2}]
    # Less than is usual for vLLM: the model is small, and so are machines that measure.
    room = {"requests": {"memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    return tiny_vllm(
        model,
        engine=engine,
        placement={"manual": pools},
        pools={"flipping": "Off"},
        template={"resources": room},
    )


def measure(deployment: Deployment, prompt: int, generated: int, rounds: int) -> Row:
    """One row: medians and the range, of interleaved rounds after one that warms up."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        tokens = draw(prompt, seed=1000 * prompt + number)
        with stream(deployment, tokens, generated) as so_far:
            answers = {
                way: go_on(deployment, way, tokens, so_far, number)
                for way in WAYS[number % 3 :] + WAYS[: number % 3]
            }
        if len({answer.tokens for answer in answers.values()}) != 1:
            raise WrongTokenError(f"{prompt} tokens, round {number}: {answers}")
        if number:
            for way, answer in answers.items():
                found[way].append(answer.first_ms)
    row: Row = {"prompt": prompt, "made": generated}
    for way, several in found.items():
        row[f"{way} ms"] = statistics.median(several)
        row[f"{way} range"] = f"{min(several):.0f}-{max(several):.0f}"
    print(row, file=sys.stderr)
    return row


@contextmanager
def stream(deployment: Deployment, prompt: Sequence[int], generated: int) -> Iterator[list[int]]:
    """Tokens of a stream that has not ended while they are used."""
    url = deployment.instances()[WRITER].engine_url
    body = ask_for(prompt, MOST_TOKENS - len(prompt))
    so_far: list[int] = []
    headers, path = headers_for(url), f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=BOUND_S) as response:
        events = read(response)
        while len(so_far) < generated:
            so_far += next(events)
        time.sleep(FLUSH_S)
        yield so_far[:generated]


@contextmanager
def stopped(deployment: Deployment) -> Iterator[None]:
    """The engine of the stream stands still; not for so long that its agent starts another."""
    server = deployment.engine(WRITER)
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(processes):
            process.resume()


def go_on(
    deployment: Deployment, way: str, prompt: Sequence[int], so_far: Sequence[int], number: int
) -> Answer:
    """Ask the other engine, in one way; what it has computed for another is hidden by a salt."""
    url = deployment.instances()[READER].engine_url
    salt = {} if way == "restored" else {"cache_salt": f"{way}{number}"}
    if way == "returned":
        ask(url, prompt, 1, salt)
    before = count_sources(url)
    with stopped(deployment):
        answer = ask(url, [*prompt, *so_far], AFTER, salt)
    came = count_sources(url).get("external_kv_transfer", 0) - before.get("external_kv_transfer", 0)
    if (came > 0) != (way == "restored"):
        raise WrongTokenError(f"{way}: {came:g} tokens came from checkpoints")
    return answer


def ask(url: str, prompt: Sequence[int], most: int, fields: dict[str, str]) -> Answer:
    """One streamed completion."""
    body = ask_for(prompt, most) | fields
    begun, first_ms, tokens = time.perf_counter(), 0.0, []
    headers, path = headers_for(url), f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=BOUND_S) as response:
        for part in read(response):
            first_ms = first_ms or 1e3 * (time.perf_counter() - begun)
            tokens += part
    return Answer(first_ms, tuple(tokens))


def kill(deployment: Deployment, generated: int, streams: int) -> Row:
    """Streams through the gateway, an engine killed among them; raises WrongTokenError."""
    prompts = [draw(900 + 40 * number, seed=number) for number in range(streams)]
    expected = [
        write(deployment.url, prompt, 2 * generated, {"cache_salt": "e"}) for prompt in prompts
    ]
    reader = deployment.instances()[READER].engine_url
    before = count_sources(reader)
    with ThreadPoolExecutor(streams) as pool:
        streams_under_way = [
            pool.submit(write, deployment.url, prompt, 2 * generated, {}) for prompt in prompts
        ]
        time.sleep(generated * 0.02)
        server = deployment.engine(WRITER)
        os.kill(server.pid, signal.SIGKILL)
        answers = [each.result(BOUND_S) for each in streams_under_way]
    wrong = sum(one != other for one, other in zip(answers, expected, strict=True))
    if wrong:
        raise WrongTokenError(f"{wrong} of {streams} streams differ after a kill")
    after = count_sources(reader)
    return {"streams": streams, "wrong": wrong} | {
        source: after.get(source, 0) - before.get(source, 0) for source in after
    }


def write(url: str, prompt: Sequence[int], most: int, fields: dict[str, str]) -> str:
    """The text of a completion."""
    body = ask_for(prompt, most) | fields
    headers, path = headers_for(url), f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, headers=headers, timeout=BOUND_S) as response:
        return "".join(choice["text"] for choice in read_choices(response))


def ask_for(prompt: Sequence[int], most: int) -> dict[str, object]:
    """A request's body."""
    return {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def read(response: httpx.Response) -> Iterator[list[int]]:
    """Tokens of each event."""
    for choice in read_choices(response):
        yield choice["token_ids"]


def read_choices(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The choice of each event."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield from json.loads(line.removeprefix("data: "))["choices"]


def count_sources(url: str) -> dict[str, float]:
    """Prompt tokens by where their KV came from."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=BOUND_S).text.splitlines():
        if line.startswith("vllm:prompt_tokens_by_source_total{"):
            source = line.split('source="')[1].split('"')[0]
            found[source] = found.get(source, 0) + float(line.split()[-1])
    return found


def draw(count: int, seed: int) -> list[int]:
    """Tokens that are text."""
    return random.Random(seed).choices(range(100, 400), k=count)


def text(column: str, value: object) -> str:
    """A cell."""
    return f"{value:.0f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
