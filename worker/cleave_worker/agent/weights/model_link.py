"""Names a model's folder after its content, for a handshake that Cleave cannot change.

Called by the supervisor and by worker nodes. vLLM's NixlConnector compares a hash with the model's
name, which is the path that vLLM was started with; connectors that keep KV have it in their keys.
So vLLM gets a link whose name has the digest of the weights: engines with other weights then refuse
each other. The link has the same path in all pods that have the folder at the same path, as engines
of one deployment do.
"""

import hashlib
import logging
import os
from pathlib import Path

from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.weights.engine_arguments import get_settings
from cleave_worker.agent.weights.loaded_weights import Weights

_log = logging.getLogger(__name__)
FOLDER = Path("/tmp")  # noqa: S108 - the same in all pods; TMPDIR may differ
_DIGITS = 8


def link_model(config: AgentConfig, weights: Weights) -> str:
    """Return what vLLM is to load as the model: a link to its folder where that is of use."""
    needs_link = config.engine == "vllm" and weights.id and _has_foreign_connector(config)
    if not needs_link or weights.fault or not Path(config.model).is_dir():
        return config.model
    target = os.path.abspath(config.model)
    # Links of other folders, whose content may change, have other names.
    name = f"{weights.id}-{hashlib.sha256(target.encode()).hexdigest()[:_DIGITS]}"
    try:
        link = open_folder(FOLDER / f"cleave-weights-{os.getuid()}") / name
        if not link.is_symlink() or os.readlink(link) != target:
            temporary = link.with_name(f"{name}.{os.getpid()}")
            temporary.symlink_to(target)
            temporary.replace(link)
    except OSError as error:
        _log.warning("NIXL does not compare weights of this engine: %s", error)
        return config.model
    return str(link)


def _has_foreign_connector(config: AgentConfig) -> bool:
    """Whether another connector than Cleave's compares or keeps KV."""
    chosen = get_settings(config.engine_args, "--kv-transfer-config")
    return config.connector == "nixl" or "kv_connector" in chosen


def open_folder(folder: Path) -> Path:
    """Create a folder that only this user can write to. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")
    return folder
