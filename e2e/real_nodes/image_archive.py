"""Images of one static program, as archives for `ctr images import`; no builder is needed."""

import hashlib
import io
import json
import tarfile
from pathlib import Path


def write_archive(program: Path, name: str, archive: Path) -> None:
    """Write an image `name` that runs `program` as user 65534, in the format of `docker save`."""
    layer = _pack({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65534:65534"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    archive.write_bytes(_pack(files, mode=0o644))


def _pack(files: dict[str, bytes], mode: int) -> bytes:
    """A tar file with these files, the same bytes each time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
