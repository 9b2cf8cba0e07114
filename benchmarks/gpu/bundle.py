"""Packs vLLM, NIXL and what they need for an H100 or H200 without a network, in small archives.

    python benchmarks/gpu/bundle.py FOLDER --python-version 3.12 --present present.txt

For machines that have torch, and take a few MiB at a time. Versions are those of uv.lock. Left
out: what is there already (`--present`: a name a line), kernels of other architectures, which are
most of vLLM, and packages that only other GPUs, images or videos need. Unpack all archives into
one folder and put that, operator/ and worker/ on PYTHONPATH.
"""

import argparse
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree

ROOT = Path(__file__).parents[2]
LEFT_OUT = re.compile(
    r"(torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|flashinfer-.*|tilelang"
    r"|quack-kernels|tokenspeed-.*|humming-kernels|nccl4py|pynvvideocodec|fastsafetensors|instanttensor"
    r"|opencv-.*|nixl-cu12|z3-solver|nccl-.*|torch-c-.*|fastapi-.+|fastar|rignore|sentry-sdk)"
)
"""Comes with torch, is for other GPUs, or for images and videos."""
UNUSED_FILES = (
    "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_flashkda_C.abi3.so",
    "vllm/_deepselect_C.abi3.so", "vllm/_qutlass_C.abi3.so", "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100", "mistral_common/data", "pycountry/locales", "nixl_ep*",
    "nixl_cu13.scripts", "nixl_cu13.libs/nixl/libplugin_[!U]*", "nixl_cu13.libs/ucx/libuct_ib*",
    "nixl_cu13.libs/ucx/libucx_perftest*", ".nixl_cu13.mesonpy.libs/plugins/libplugin_[!U]*",
)  # fmt: skip
"""vLLM's Rust front end, FlashAttention 2, kernels for models of other kinds and for Blackwell;
plug-ins of NIXL for other than UCX, and those of UCX for network cards."""
NIXL_ROOTS = (
    "nixl_cu13/*.so", ".nixl_cu13.mesonpy.libs/**/*.so", "nixl_cu13.libs/nixl/*.so",
    "nixl_cu13.libs/ucx/*.so*",
)  # fmt: skip
"""What loads the libraries that come with NIXL, of which most are for other plug-ins."""
ARCHITECTURE = 90
"""Compute capability 9.0."""
FAT_BINARY = 0xBA55ED50
MACHINE_CODE, INTERMEDIATE_CODE = 2, 1
WITHOUT_INTERMEDIATE_CODE = ("_moe_C",)
"""Its kernels for the architecture are all machine code."""


def main() -> None:
    """Install into a folder, leave out what is not needed, pack."""
    args = build_parser().parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for file in args.folder.glob("part-*.tar.xz"):
        file.unlink()
    present = read_names(args.present) if args.present else set()
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        install(list_requirements(present), site, args.python_version)
        drop_files(site)
        for library in site.glob("vllm/**/*.so"):
            keep_architecture(library)
        describe_cleave(site)
        for file in pack(site, args.folder, args.largest_mib << 20):
            print(f"{file} {file.stat().st_size / 2**20:.1f} MiB")


def read_names(file: Path) -> set[str]:
    """Names of packages, as uv writes them."""
    return {re.sub(r"[-_.]+", "-", name).lower() for name in file.read_text().split()}


def list_requirements(present: set[str]) -> Iterator[str]:
    """Packages of the extra worker-cuda, as locked, that the machine needs."""
    words = ["uv", "export", "--frozen", "--no-dev", "--extra", "worker-cuda", "--no-hashes"]
    words += ["--no-emit-project", "--no-annotate", "--no-header", "--quiet"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name = line.partition("==")[0].strip()
        if name and not LEFT_OUT.fullmatch(name) and name not in present:
            yield line


def install(requirements: Iterable[str], site: Path, python_version: str) -> None:
    """Wheels for the machine, without what they require."""
    words = ["uv", "pip", "install", "--no-deps", "--quiet", "--target", str(site), "-r", "-"]
    words += ["--python-version", python_version, "--only-binary", ":all:"]
    words += ["--python-platform", "x86_64-manylinux_2_35"]
    subprocess.run(words, input="\n".join(requirements), text=True, check=True)


def drop_files(site: Path) -> None:
    """Delete what is not used."""
    for pattern in UNUSED_FILES:
        for path in site.glob(pattern):
            rmtree(path) if path.is_dir() else path.unlink()
    libraries = {path.name: path for path in site.glob("nixl_cu13.libs/*.so*")}
    pending = [path for pattern in NIXL_ROOTS for path in site.glob(pattern)]
    needed: set[str] = set()
    while pending:
        names = list_needed(pending.pop()) - needed
        needed |= names
        pending += [libraries[name] for name in names if name in libraries]
    for name in libraries.keys() - needed:
        libraries[name].unlink()


def list_needed(library: Path) -> set[str]:
    """Names of the libraries that one loads."""
    done = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout))


def keep_architecture(library: Path) -> None:
    """Zero all other code in a library's fat binaries, which compresses to nothing. Where there is
    no machine code for ARCHITECTURE, the newest intermediate code that it can run stays."""
    content = bytearray(library.read_bytes())
    for begin, end in find_sections(library):
        position = begin
        while position < end - 16:
            magic, _, header, size = struct.unpack_from("<IHHQ", content, position)
            if magic != FAT_BINARY:
                position += 8
                continue
            last = position + header + size
            drop_code(content, position + header, last, library.name)
            position = last
    library.write_bytes(content)


def drop_code(content: bytearray, begin: int, end: int, name: str) -> None:
    """Zero what another architecture runs, in one fat binary."""
    entries, position = [], begin
    while position < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", content, position)
        (made_for,) = struct.unpack_from("<I", content, position + 28)
        entries.append((kind, made_for, position + header, size))
        position += header + size
    kept = [(MACHINE_CODE, ARCHITECTURE)]
    if kept[0] not in {entry[:2] for entry in entries}:
        texts = [made for kind, made, *_ in entries if kind == INTERMEDIATE_CODE]
        is_needed = not name.startswith(WITHOUT_INTERMEDIATE_CODE)
        newest = max((made for made in texts if made <= ARCHITECTURE), default=0)
        kept = [(INTERMEDIATE_CODE, newest)] if is_needed else []
    for kind, made_for, start, size in entries:
        if (kind, made_for) not in kept:
            content[start : start + size] = bytes(size)


def find_sections(library: Path) -> Iterator[tuple[int, int]]:
    """Where a library has fat binaries: first byte and end."""
    done = subprocess.run(
        ["readelf", "-SW", str(library)], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        if ".nv_fatbin" in line:
            offset, size = (int(word, 16) for word in line.partition("]")[2].split()[3:5])
            yield offset, offset + size


def describe_cleave(site: Path) -> None:
    """The project's metadata, in which vLLM finds Cleave's plug-ins; its code travels by itself."""
    words = ["uv", "build", "--wheel", "--quiet", "--out-dir", str(site.parent), str(ROOT)]
    subprocess.run(words, check=True)
    (wheel,) = site.parent.glob("*.whl")
    subprocess.run(["unzip", "-q", str(wheel), "*.dist-info/*", "-d", str(site)], check=True)


def pack(site: Path, folder: Path, largest_bytes: int) -> Iterator[Path]:
    """Archives of files, large ones first, that unpack in parallel; each below the limit."""
    files = sorted(filter(Path.is_file, site.rglob("*")), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor() as pool:
        sizes = dict(zip(files, pool.map(compress_size, files), strict=True))
    parts: list[list[Path]] = []
    totals: list[int] = []
    if sizes[largest := max(files, key=lambda path: sizes[path])] > largest_bytes:
        raise SystemExit(f"--largest-mib: {largest.name} alone has {sizes[largest] >> 20} MiB")
    for file in sorted(files, key=lambda path: -sizes[path]):
        number = next((n for n, t in enumerate(totals) if t + sizes[file] < largest_bytes), None)
        if number is None:
            number = len(parts)
            parts.append([])
            totals.append(0)
        parts[number].append(file)
        totals[number] += sizes[file]
    for number, part in enumerate(parts):
        target = folder / f"part-{number}.tar.xz"
        with tarfile.open(target, "w:xz") as archive:
            for file in sorted(part):
                archive.add(file, file.relative_to(site))
        yield target


def compress_size(file: Path) -> int:
    """Bytes of a file in an archive, or a little more."""
    return len(lzma.compress(file.read_bytes(), preset=1))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="for the archives")
    default = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python-version", default=default, help="of the machine")
    parser.add_argument("--present", type=Path, help="names of packages that the machine has")
    parser.add_argument("--largest-mib", type=int, default=44, help="of an archive")
    return parser


if __name__ == "__main__":
    main()
