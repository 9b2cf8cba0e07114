"""Compile what every request passes through, from its own sources, to C: half the CPU time.

`scripts/compile.py FOLDER` puts extension modules beside the packages in FOLDER (site-packages of
an image, a copy of the sources), where Python prefers them; nothing is left in the repository,
whose sources stay what runs there. Needs a C compiler and the development tools.

What is hard: a compiled class keeps its attributes where C finds them. So modules stay Python whose
classes get properties in place of attributes (books that processes share), whose objects are looked
through by `vars`, and whose structs msgspec decodes: of a union mypyc 1 keeps nothing for it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "gateway": "context head request",
    "gateway.admission": "door lateness",
    "gateway.counts": "tally",
    "gateway.engines": "engine",
    "gateway.exchanges": "attempt exchange relay",
    "gateway.front": "client pages",
    "gateway.recovery": "recovery",
    "gateway.stories": "watched",
    "router": "board boards chooser directory router shared_board shared_router",
}
"""Modules by package. They are compiled together, so that they call each other directly."""
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
