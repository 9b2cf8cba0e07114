"""Compile what every request passes through, from its own sources, to C: half the CPU time.

`scripts/compile.py FOLDER` puts extension modules beside the packages in FOLDER (site-packages of
an image, a copy of the sources), where Python prefers them; nothing is left in the repository,
whose sources stay what runs there. Needs a C compiler and the development tools.

What is hard: compiled code is not quite Python. Classes keep their attributes where C finds them,
so nothing interpreted inherits from them or looks through them by `vars`; what msgspec decodes
stays Python, for of a union nothing is left for it; values must be of the very types that are
stated (a `numpy.bool` is no bool, a set no frozenset); and `not x` of something that may be None
asks for None only. `make check-compiled` finds such things: the same tests with what is compiled.
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
    "gateway.admission": "api_keys controller deadline fair_queue rate_limit shared_rate_limit",
    "gateway.app": "client_connection handlers",
    "gateway.failover": "retry_policy",
    "gateway.http": (
        "completion_request connection_limiter headers request_parser token_estimate write_batcher"
    ),
    "gateway.metrics": "gateway_metrics request_outcomes",
    "gateway.proxy": "attempt proxied_request sse_relay",
    "gateway.tracing": "instrumented_request",
    "gateway.upstream": "circuit_breaker connection_pool kv_transfer_params stream_start",
    "policy": "dispatch length_ranges output_length queue_model",
    "router": (
        "instance registry router score_column score_table selection shared_load"
        " shared_router shared_score_table"
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
    """Raises CalledProcessError, with the compiler's words, when it cannot be done."""
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
    """Say of a module's names that they stay what they are: no dictionary is asked for them then.

    Left alone are those of types, which begin with one capital, and of tuples over several lines.
    """
    settled = _NAME.sub(r"\1: Final = ", _NAMES.sub(_part, source))
    if settled == source:
        return source
    # Behind the docstring, which is the first statement.
    end = source.index('"""', source.index('"""') + 3) + 3
    return f"{settled[:end]}\nfrom typing import Final{settled[end:]}"


def _part(line: re.Match[str]) -> str:
    """Several names of one line, each by itself but on that line."""
    names, values = (each.split(", ") for each in line.groups())
    pairs = zip(names, values, strict=True)
    return "; ".join(f"{name}: Final = {value}" for name, value in pairs)


def main() -> None:
    """Exit code 1 when a module does not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="holds the package `cleave`")
    folder = parser.parse_args().folder
    if not (folder / "cleave").is_dir():
        parser.error(f"{folder} holds no package `cleave`")
    try:
        compile_into(folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout}\n{error.stderr}")


if __name__ == "__main__":
    main()
