"""What one GPU gives Cleave, in one command, without a network: copies, links, operators, engines.

    python benchmarks/gpu/one_gpu.py -O one_gpu.json
    python benchmarks/gpu/one_gpu.py --parts engine nixl cleave --model FOLDER --dummy

Parts a to g need torch only (copies.py, mapped.py, operators.py); `engine`, `nixl` and `cleave`
start vLLM under agents (engines.py). On a machine without a GPU all of it runs on the CPU, smaller.
Exit code 1: other bytes came than were sent.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import copies
import mapped
import operators
import torch
from rich.console import Console
from rich.table import Table

from cleave.perf.hardware.gpu import Gpu, UnknownGpuError, find_gpu

KERNELS = {
    "a": "gathering and scattering a prompt by copies and by kernels",
    "b": "a prompt from another process over every link; d, the one over gloo, is among its rows",
    "c": "waits for events, copies to pinned memory beside products",
    "e": "products, attention, reads of KV",
    "f": "registration of memory with NIXL",
    "g": "prompts from another process by CUDA IPC, and the death of that process",
}
ENGINES = {
    "engine": "one vLLM engine under the agent, and its profile",
    "nixl": "prefill and decode engine with vLLM's NixlConnector",
    "cleave": "the same with Cleave's connector",
    "simulated": "what the simulator says of what --folder has; anywhere",
}
"""What each part measures."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs."""

    device: torch.device
    sizes: copies.Sizes
    gpu: Gpu | None


def main() -> None:
    """Run the parts; a part that fails, or takes too long, is a row, and the others still run."""
    args = build_parser().parse_args()
    if args.output_file and not os.access(args.output_file.absolute().parent, os.W_OK):
        sys.exit(f"-O {args.output_file}: its folder does not exist or cannot be written")
    machine = find_machine(cpu=args.cpu)
    name = machine.gpu.name if machine.gpu else str(machine.device)
    print(f"{name}, torch {torch.__version__}", file=sys.stderr)
    rows: list[copies.Row] = []
    is_wrong = False
    environment = dict(os.environ)
    for part in args.parts:
        # Parts name transports of UCX, and take most of a GPU's memory.
        os.environ.clear()
        os.environ.update(environment)
        torch.cuda.empty_cache()
        try:
            with limit_time(args.part_seconds):
                for row in run_part(part, machine, args):
                    rows.append(row)
                    write(args.output_file, name, rows)
                    text = f"{row.part}: {row.what} {format_value(row)} {row.unit} {row.note}"
                    print(text, file=sys.stderr)
        except copies.WrongBytesError as error:
            is_wrong = True
            rows.append(copies.Row(part, "WRONG BYTES", note=str(error)))
        except Exception as error:  # noqa: BLE001 - the time on such a machine is short
            rows.append(copies.Row(part, "failed", note=f"{type(error).__name__}: {error}"[:400]))
        write(args.output_file, name, rows)
    show(rows)
    sys.exit(is_wrong)


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`; context managers end what a part has started."""

    def end_part(_signal: int, _frame: object) -> NoReturn:
        raise TimeoutError("the part took longer than --part-seconds")

    handler = signal.signal(signal.SIGALRM, end_part)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def run_part(part: str, machine: Machine, args: argparse.Namespace) -> Iterator[copies.Row]:
    """The rows of one part."""
    device, sizes = machine.device, machine.sizes
    parts: dict[str, Callable[[], Iterator[copies.Row]]] = {
        "a": lambda: copies.measure_gil(device, sizes),
        "b": lambda: copies.measure_links(device, sizes),
        "c": lambda: copies.measure_events(device, sizes),
        "e": lambda: operators.measure_operators(device, sizes, machine.gpu),
        "f": lambda: copies.measure_registration(device, sizes),
        "g": lambda: mapped.measure_mapped(device, sizes),
    }
    if part in parts:
        yield from parts[part]()
        return
    import engines

    setup = build_setup(args, on_gpu=device.type == "cuda")
    if part == "engine":
        yield from engines.measure_engine(setup)
    elif part == "simulated":
        yield from engines.measure_simulated(setup)
    else:
        yield from engines.measure_pair(setup, part)


def build_setup(args: argparse.Namespace, *, on_gpu: bool) -> "engines.Setup":  # noqa: F821
    """Engines that share one GPU, or the tiny model on a CPU."""
    import engines

    args.folder.mkdir(parents=True, exist_ok=True)
    if on_gpu and args.model is None:
        raise ValueError("--model: name a folder with config.json and a tokenizer")
    model = args.model
    if model is None:
        from cleave.local import tiny_model

        model = tiny_model.get_or_build()
    words = ["--dtype", "float32"]
    if on_gpu:
        words = ["--gpu-memory-utilization", "0.42", "--max-model-len", "16384"]
        words += ["--load-format", "dummy", "--seed", "0"] if args.dummy else []
    return engines.Setup(
        model=model,
        args=(*words, *shlex.split(args.engine_args)),
        folder=args.folder,
        limits=engines.ON_GPU if on_gpu else engines.ON_CPU,
        num_requests=8 if on_gpu else 3,
        start_s=args.start_seconds,
        profile_args=tuple(shlex.split(args.profile_args)),
        data=args.data,
        rates=tuple(args.rates),
        load_s=args.load_seconds,
    )


def find_machine(*, cpu: bool) -> Machine:
    """The first GPU, or the CPU."""
    if cpu or not torch.cuda.is_available():
        torch.set_num_threads(1)
        return Machine(torch.device("cpu"), copies.ON_CPU, None)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    try:
        gpu = find_gpu(torch.cuda.get_device_name(device).replace(" ", "-"))
    except UnknownGpuError:
        gpu = None
    return Machine(device, copies.ON_GPU, gpu)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    texts = (f"  {part:8}{text}" for part, text in (KERNELS | ENGINES).items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(("parts:", *texts)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = [*KERNELS, *ENGINES]
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=parts,
        default=list(KERNELS),
        metavar="PART",
        help=f"{', '.join(parts)}; default: {' '.join(KERNELS)}",
    )
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--model", type=Path, help="folder with config.json and a tokenizer")
    parser.add_argument("--dummy", action="store_true", help="the folder has no weights")
    folder = Path(tempfile.gettempdir()) / "cleave-one-gpu"
    parser.add_argument("--folder", type=Path, default=folder, help="for logs and the profile")
    parser.add_argument("-O", "--output-file", type=Path, help="JSON, written after each row")
    parser.add_argument("--engine-args", default="", help="further arguments of engines")
    parser.add_argument("--profile-args", default="--quick", help="of `cleave profile`")
    parser.add_argument("--data", type=Path, help="folder with Azure's conversations, for loads")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="requests/s of loads")
    parser.add_argument("--load-seconds", type=float, default=30, help="length of each load")
    parser.add_argument("--start-seconds", type=float, default=500, help="limit of engines' start")
    parser.add_argument("--part-seconds", type=float, default=600, help="limit of each part")
    return parser


def write(path: Path | None, name: str, rows: list[copies.Row]) -> None:
    """Write what is known so far."""
    if path:
        content = {"machine": name, "torch": torch.__version__, "rows": [*map(asdict, rows)]}
        path.write_text(json.dumps(content, indent=2))


def format_value(row: copies.Row) -> str:
    """Four significant digits; empty: the row has no figure."""
    return "" if row.value is None else f"{row.value:,.4g}"


def show(rows: list[copies.Row]) -> None:
    """As a table."""
    table = Table("part", "what", "value", "unit", "")
    for row in rows:
        table.add_row(row.part, row.what, format_value(row), row.unit, row.note)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
