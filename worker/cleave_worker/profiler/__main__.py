"""Command line of the operator profiler: `python -m cleave_worker.profiler` on a GPU machine.

Writes the profile that the planner reads: operators of one layer for every tensor parallel size,
measured on one GPU, and collectives if there are several GPUs.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from cleave import distribution
from cleave.perf.model import model_shape
from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.profile.profile import MeasuredProfile, write_profile

_DTYPES = ("bfloat16", "float16", "float32")


class ProfilerParser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"profiler: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; return 0, or 1 for errors and 2 for a rejected command line."""
    args = _build_parser().parse_args(argv)
    try:
        import torch
    except ImportError:
        install = distribution.build_install_command(["worker-cuda"])
        return _fail(f"torch is not installed; it comes with vLLM: {install}")
    from cleave_worker.profiler.clock import CpuClock, CudaClock
    from cleave_worker.profiler.collectives import CollectiveError
    from cleave_worker.profiler.measure import build_full_grid, build_quick_grid, measure
    from cleave_worker.profiler.operators import DeviceSpec, ShardError

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.cpu:
        return _fail("there is no GPU; --cpu measures this machine's cores instead")
    clock = CudaClock() if on_gpu and not args.cpu else CpuClock()
    device_spec = DeviceSpec(clock.device, getattr(torch, args.dtype))
    visible = torch.cuda.device_count() if clock.device.type == "cuda" else 1
    build_grid = build_quick_grid if args.quick else build_full_grid
    name = torch.cuda.get_device_name() if clock.device.type == "cuda" else platform.machine()
    try:
        shape = model_shape.load_shape(args.model)
        with torch.inference_mode():
            operators = measure(
                shape,
                args.tensor_parallel_sizes,
                clock,
                device_spec,
                build_grid(args.longest),
                visible if args.gpus is None else args.gpus,
                lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
            )
        profile = MeasuredProfile(
            model=args.model,
            device=args.device or name,
            engine="torch",
            measured_at=datetime.now(UTC).date().isoformat(),
            software=_collect_versions(),
            max_model_len=shape.max_model_len,
            operators=operators,
        )
        write_profile(profile, args.output_file)
    except torch.OutOfMemoryError:
        return _fail("the GPU's memory does not suffice; lower --longest or leave size 1 out")
    except (
        model_shape.UnknownModelError,
        ModelConfigError,
        ShardError,
        CollectiveError,
        InvalidProfileError,
        OSError,
    ) as error:
        return _fail(str(error))
    return 0


def _collect_versions() -> dict[str, str]:
    import torch

    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
    return versions


def _build_parser() -> ProfilerParser:
    parser = ProfilerParser(
        prog="cleave_worker.profiler",
        description="Measure a model's operators.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder with a config.json, or a known name")
    add("--output-file", "-O", type=Path, default=Path("operators.yaml"), help="YAML, or .json")
    add("--device", help="name of the GPU in the catalogue; absent: as its driver says")
    add(
        "--tensor-parallel-sizes",
        type=_parse_sizes,
        default=(1, 2, 4, 8),
        help="shards to measure, on one GPU, such as 1,2,4",
    )
    add("--dtype", choices=_DTYPES, default="bfloat16")
    add(
        "--longest",
        type=_parse_longest,
        default=8192,
        help="tokens of the longest prompt, 64 or more",
    )
    add("--gpus", type=int, help="for collectives; absent: all that are there")
    add("--cpu", action="store_true", help="measure on CPU; --gpus are processes then")
    add("--quick", action="store_true", help="few points: does everything work?")
    return parser


def _parse_sizes(text: str) -> tuple[int, ...]:
    sizes = sorted({int(word) for word in text.split(",")})
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return tuple(sizes)


def _parse_longest(text: str) -> int:
    if int(text) < 64:
        raise argparse.ArgumentTypeError("must be 64 or more")
    return int(text)


def _fail(fault: str) -> int:
    sys.stderr.write(f"profiler: {fault}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
