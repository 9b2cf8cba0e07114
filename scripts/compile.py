"""Compile the modules on the request path to C with mypyc, which halves their CPU time.

`scripts/compile.py FOLDER` writes extension modules beside the packages in FOLDER (site-packages of
an image, or a copy of the sources), where Python prefers them; the repository is not modified.
Needs a C compiler and the development tools.

What is hard: compiled code differs from Python. Compiled classes have no `__dict__`, so interpreted
classes cannot inherit from them and `vars` does not work; msgspec structs stay interpreted, because
mypyc does not keep the union types that msgspec reads from annotations; values must have exactly
the annotated types (a `numpy.bool` is not a bool, a set is not a frozenset); and `not x` of an
optional only compares with None. `make check-compiled` runs the same tests with the compiled
modules.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "gateway": "context",
    "gateway.admission": "api_keys controller deadline fair_queue rate_limit ticket",
    "gateway.app": "client_connection cors handlers",
    "gateway.failover": "retry_policy transcript",
    "gateway.http": (
        "buffer_budget completion_request connection_limiter headers request_parser stream_fields"
        " token_estimate write_batcher"
    ),
    "gateway.metrics": "gateway_metrics",
    "gateway.proxy": (
        "attempt event_splitter event_template proxied_request request_observer sse_relay"
        " token_charge usage_counts"
    ),
    "gateway.tracing": "recording_observer",
    "gateway.upstream": "circuit_breaker connection_pool kv_transfer_params stream_start",
    "policy": (
        "cache_horizon dispatch host_memory output_length prefix_cache prompt_cost queue_model"
        " reuse_times"
    ),
    "router": (
        "cache_hits cached_prompts instance prefix_index registry router routing_request"
        " score_table selection shared_load shared_score_table"
    ),
    "shm": "change_log",
}
"""Modules by package. They are compiled together, so that they call each other directly."""
_NAME = re.compile(r"^(_?[a-z][a-z0-9_]*|_?[A-Z][A-Z0-9_]+) = (?!\(\n)", re.MULTILINE)
_NAMES = re.compile(
    r"^(_?[A-Z][A-Z0-9_]*(?:, _?[A-Z][A-Z0-9_]*)+) = ([\w.+ ]+(?:, [\w.+ ]+)+)$", re.M
)
_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

compiled = mypycify({paths!r}, opt_level="3")
setup(name="compiled", package_dir={{"": "operator"}}, ext_modules=compiled)
"""


def compile_into(folder: Path) -> None:
    """Compile MODULES into `folder`. Raises CalledProcessError with the compiler's output."""
    paths = [
        f"operator/cleave/{package.replace('.', '/')}/{module}.py"
        for package, modules in MODULES.items()
        for module in modules.split()
    ]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for source in ("operator", "worker", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, work / source)
        for path in paths:
            (work / path).write_text(settle((work / path).read_text()))
        (work / "setup.py").write_text(_SETUP.format(paths=paths))
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel"]
        environment = os.environ | {"MYPYPATH": "operator:worker", "PYTHONWARNINGS": "ignore"}
        subprocess.run(
            [*command, str(os.cpu_count() or 1)],
            cwd=work,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        built = work / "operator"
        for library in built.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            shutil.copy(library, folder / library.relative_to(built))


def settle(source: str) -> str:
    """Annotate the constants of a module as Final, so that mypyc inlines them.

    Excluded are type aliases, which begin with one capital, and tuples over several lines.
    """
    annotated = _NAME.sub(r"\1: Final = ", _NAMES.sub(_part, source))
    if annotated == source:
        return source
    # After the docstring, which is the first statement.
    end = source.index('"""', source.index('"""') + 3) + 3
    return f"{annotated[:end]}\nfrom typing import Final{annotated[end:]}"


def _part(line: re.Match[str]) -> str:
    """Split an assignment to several names into annotated ones on the same line."""
    names, values = (each.split(", ") for each in line.groups())
    pairs = zip(names, values, strict=True)
    return "; ".join(f"{name}: Final = {value}" for name, value in pairs)


def main() -> None:
    """Run the command line; exit code 1 when a module does not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder that contains the package `cleave`")
    folder = parser.parse_args().folder
    if not (folder / "cleave").is_dir():
        parser.error(f"{folder} does not contain the package `cleave`")
    try:
        compile_into(folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout}\n{error.stderr}")


if __name__ == "__main__":
    main()
