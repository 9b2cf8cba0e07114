"""Each field of vLLM's request classes: an engine's answer beside the gateway's, whole and split.

    .venv/bin/python benchmarks/fields/run.py      # writes the tables of README.md

Real engines on CPU. Each request goes to an engine directly, through a gateway to a mixed instance,
and through one to a prefill and a decode instance.
"""

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from cleave.local import tiny_model

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent))

from comparison import (
    DIRECT,
    SPLIT,
    WHOLE,
    Answer,
    Difference,
    compare,
    find_reason,
    read_answer,
)
from request_values import BASES, Case, list_cases

from e2e.support.deployments import deployed, start_fast, tiny_vllm
from e2e.support.engine_keys import headers_for

FOLDER = Path(__file__).parent
README, REASONS = FOLDER / "README.md", FOLDER / "reasons.yaml"
MODEL = "tiny"
BOUND_S = 120.0
AT_ONCE = 4
FEW, MAX_SHOWN = 3, 60
ARGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "xlam"),
    # A random model would go on with blanks for ever.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
MAX_LEN = 256
"""Tokens, so that an answer without a limit ends soon."""


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", choices=BASES, help="only this path")
    parser.add_argument("--field", help="only this field")
    parser.add_argument("--answers", type=Path, help="write all answers to this file, as JSON")
    args = parser.parse_args()
    reasons = yaml.safe_load(REASONS.read_text())
    cases = [
        case
        for path in BASES
        if args.path in (None, path)
        for case in list_cases(path, MODEL)
        if args.field in (None, case.field)
    ]
    with tempfile.TemporaryDirectory() as folder:
        answers = collect(Path(folder), cases)
    if args.answers:
        args.answers.write_text(json.dumps(answers))
    table = "\n".join(build_tables(cases, answers, reasons))
    print(table)
    if args.path is None and args.field is None:
        write_tables(table)


def collect(folder: Path, cases: Sequence[Case]) -> dict[str, list[Answer]]:
    """The answers by way, in the order of the cases."""
    model = folder / "model"
    tiny_model.build(model)
    engine = start_fast(args=[*ARGS])
    answers: dict[str, list[Answer]] = {}
    one = {"manual": [{"role": "mixed", "replicas": 1}]}
    manifest = tiny_vllm(model, engine=engine, placement=one)
    with started(manifest, folder / WHOLE) as deployment:
        (registered,) = deployment.instances().values()
        url = registered.engine_url
        answers[DIRECT] = ask_all(url, headers_for(url), cases)
        answers[WHOLE] = ask_all(deployment.url, {}, cases)
    with started(tiny_vllm(model, engine=engine), folder / SPLIT) as deployment:
        answers[SPLIT] = ask_all(deployment.url, {}, cases)
    return answers


def started(manifest: dict[str, Any], folder: Path) -> Any:
    """A deployment with short contexts."""
    folder.mkdir()
    manifest["spec"]["model"]["maxModelLen"] = MAX_LEN
    manifest["spec"]["pools"] = {"flipping": "Off"}
    return deployed(manifest, folder, timeout_s=420)


def ask_all(url: str, headers: dict[str, str], cases: Sequence[Case]) -> list[Answer]:
    """The answers to all requests."""
    with httpx.Client(timeout=BOUND_S, headers=headers) as client:

        def ask(case: Case) -> Answer:
            try:
                answer = client.post(url + case.path, json=case.body)
            except httpx.HTTPError as error:
                return {"status": type(error).__name__}
            return read_answer(answer)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [*pool.map(ask, cases)]


def build_tables(
    cases: Sequence[Case], answers: dict[str, list[Answer]], reasons: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Counts by path, and what differs with its reason."""
    found = [(each, find_reason(each, reasons)) for each in compare(cases, answers)]
    yield "| path | fields | requests | accepted directly | split | differ | without a reason |"
    yield "|---|---|---|---|---|---|---|"
    for path in dict.fromkeys(case.path for case in cases):
        own = [number for number, case in enumerate(cases) if case.path == path]
        fields = {cases[number].field for number in own} - {""}
        accepted = sum(answers[DIRECT][number]["status"] == httpx.codes.OK for number in own)
        split = sum(answers[SPLIT][number].get("split", False) for number in own)
        differ = {id(each.case) for each, _ in found if each.case.path == path}
        unknown = {id(each.case) for each, why in found if each.case.path == path and not why}
        counts = len(fields), len(own), accepted, split, len(differ), len(unknown)
        yield f"| `{path}` | {' | '.join(map(str, counts))} |"
    yield ""
    yield "| path | what differs | in requests with | reason |"
    yield "|---|---|---|---|"
    rows: dict[tuple[str, str], list[Difference]] = collections.defaultdict(list)
    for each, why in found:
        rows[each.case.path, why].append(each)
    for (path, why), differences in sorted(rows.items()):
        # A stream has the whole answer in its last event.
        whats = dict.fromkeys(each.what.removeprefix("response.") for each in differences)
        names = [*dict.fromkeys(map(describe_case, differences))]
        yield f"| `{path}` | {', '.join(whats)} | {shorten(names)} | {why or '**none**'} |"


def describe_case(each: Difference) -> str:
    """A field and its value, shortened."""
    case = each.case
    value = json.dumps(case.value)[:MAX_SHOWN].replace("|", "/")
    streamed = ", streamed" if case.body.get("stream") is True else ""
    return f"`{case.field}` `{value}`{streamed}" if case.field else f"no field{streamed}"


def shorten(names: Sequence[str]) -> str:
    """The first of many."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return "; ".join(names[:FEW]) + more


def write_tables(table: str) -> None:
    """Put the tables into README.md."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    before, begin, rest = README.read_text().partition("<!-- tables -->\n")
    _, end, after = rest.partition("<!-- end of the tables -->")
    README.write_text(f"{before}{begin}Of commit {commit}.\n\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
