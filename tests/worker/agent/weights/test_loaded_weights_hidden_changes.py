"""What changes the weights of an engine while names, sizes and times may stay as they are."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cleave_worker.agent.weights import fingerprint, tensor_samples
from cleave_worker.agent.weights.loaded_weights import WeightReader, Weights
from cleave_worker.agent.weights.weight_sources import list_sources

OLD, NEW = "a" * 40, "b" * 40
SHARD = "model-00001-of-00002.safetensors"
TEXTS = {
    SHARD: "first half",
    "model-00002-of-00002.safetensors": "second half",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARD}}),
    "model-rank-0-part-0.safetensors": "as a sharded state",
    "model.gguf": "GGUF",
    "config.json": json.dumps({"quantization_config": {"bits": 4}}),
    "hf_quant_config.json": json.dumps({"kv_cache_quant_algo": "FP8"}),
    "tokenizer.json": json.dumps({"version": "1.0"}),
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
    "chat_template.jinja": "{{ messages }}",
    "modeling_own.py": "x = 1",
    "LICENSE.safetensors": "a tensor",
}


@dataclass
class Place:
    """Where a test keeps models, and how an engine is started."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def read(self, arguments: tuple[str, ...], model: str) -> Weights:
        reader = WeightReader(self.env, offline=True)
        sources = list_sources(self.name(model), [self.name(each) for each in arguments])
        return reader.read(sources, lambda share: None)

    def find_change(self, weights: Weights) -> str:
        return WeightReader(self.env, offline=True).find_change(weights, lambda share: None)

    def name(self, text: str) -> str:
        return text.replace("FOLDER", str(self.folder))

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def move(self, commit: str, name: str, branch: str = "main") -> None:
        self.write(f"hub/models--org--{name}/refs/{branch}", commit)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    for name, text in TEXTS.items():
        found.write(f"m/{name}", text)
    for name in ("adapter/adapter_model.safetensors", "draft/model.safetensors", "scales.json"):
        found.write(name, "before")
    found.write("tensors.bin", "before")
    for name in ("m", "draft", "tokenizer", "config", "adapter"):
        for branch in ("main", "v1"):
            found.move(OLD, name, branch)
    # As a cache of Hugging Face has a commit.
    for name in ("1", "2"):
        found.write(f"hub/models--org--m/blobs/{name}", name)
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / OLD
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    return found


def write_in_place(path: Path) -> None:
    """Other bytes of the same number, with the times of before."""
    before = path.stat()
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    kept = (after.st_size, after.st_mtime_ns, after.st_ino)
    assert kept == (before.st_size, before.st_mtime_ns, before.st_ino)


def in_place(name: str) -> Callable[[Place], None]:
    return lambda place: write_in_place(place.folder / name)


def moved(name: str, branch: str = "main") -> Callable[[Place], None]:
    return lambda place: place.move(NEW, name, branch)


def turn_snapshot(place: Place) -> None:
    link = place.folder / SNAPSHOT / "model.safetensors"
    link.unlink()
    link.symlink_to("../../blobs/2")


SNAPSHOT = f"hub/models--org--m/snapshots/{OLD}"
BLOB = in_place("hub/models--org--m/blobs/1")
DRAFT = in_place("draft/model.safetensors")
ADAPTER = in_place("adapter/adapter_model.safetensors")
TENSORS = in_place("tensors.bin")
SEEN = {
    **{name: ("FOLDER/m", (), in_place(f"m/{name}")) for name in TEXTS},
    "GGUF alone": ("FOLDER/m/model.gguf", (), in_place("m/model.gguf")),
    "link of a snapshot": (f"FOLDER/{SNAPSHOT}", (), turn_snapshot),
    "blob of a snapshot": (f"FOLDER/{SNAPSHOT}", (), BLOB),
    "branch": ("org/m", (), moved("m")),
    "--revision": ("org/m", ("--revision", "v1"), moved("m", "v1")),
    "--tokenizer": ("FOLDER/m", ("--tokenizer", "org/tokenizer"), moved("tokenizer")),
    "--tokenizer of --revision": (
        "org/m",
        ("--tokenizer", "org/tokenizer", "--revision", "v1"),
        moved("tokenizer", "v1"),
    ),
    "--tokenizer-revision alone": ("org/m", ("--tokenizer-revision", "v1"), moved("m", "v1")),
    "--hf-config-path": (
        "FOLDER/m",
        ("--hf-config-path=org/config", "--revision=v1"),
        moved("config", "v1"),
    ),
    "--lora-modules": ("FOLDER/m", ("--lora-modules", "a=FOLDER/adapter"), ADAPTER),
    "--lora-modules before -sc": (
        "FOLDER/m",
        ("--lora-modules", "a=FOLDER/adapter", "-sc", "{}"),
        ADAPTER,
    ),
    "--default-mm-loras": ("FOLDER/m", ("--default-mm-loras.audio", "FOLDER/adapter"), ADAPTER),
    "draft": ("FOLDER/m", ("--speculative-config", '{"model": "FOLDER/draft"}'), DRAFT),
    "draft, short": ("FOLDER/m", ("-sc", '{"model": "FOLDER/draft"}'), DRAFT),
    "draft, in parts": ("FOLDER/m", ("--speculative_config.model=FOLDER/draft",), DRAFT),
    "draft, short in parts": ("FOLDER/m", ("-sc.model", "FOLDER/draft"), DRAFT),
    "draft, by name": ("FOLDER/m", ("--spec-model", "FOLDER/draft"), DRAFT),
    "draft on a branch": (
        "FOLDER/m",
        ("-sc.model", "org/draft", "-sc.revision", "v1"),
        moved("draft", "v1"),
    ),
    "draft with a loader": (
        "FOLDER/m",
        (
            *("-sc.model", "FOLDER/draft", "-sc.draft_load_config.model_loader_extra_config"),
            '{"tensorizer_uri": "FOLDER/tensors.bin"}',
        ),
        TENSORS,
    ),
    "tensorizer": (
        "FOLDER/m",
        (
            *("--load-format", "tensorizer", "--model-loader-extra-config"),
            '{"tensorizer_config": {"tensorizer_uri": "FOLDER/tensors.bin"}}',
        ),
        TENSORS,
    ),
    "tensorizer, in parts": (
        "FOLDER/m",
        ("--model-loader-extra-config.tensorizer_config.tensorizer_uri=FOLDER/tensors.bin",),
        TENSORS,
    ),
    "scales": (
        "FOLDER/m",
        ("--mm-encoder-fp8-scale-path=FOLDER/scales.json",),
        in_place("scales.json"),
    ),
    "--load-format dummy": ("FOLDER/m", ("--load-format", "dummy"), in_place(f"m/{SHARD}")),
}


@pytest.mark.parametrize(("model", "arguments", "change"), SEEN.values(), ids=SEEN)
def test_other_content_is_another_identity(
    place: Place, model: str, arguments: tuple[str, ...], change: Callable[[Place], None]
) -> None:
    before = place.read(arguments, model)
    assert (before.fault, place.read(arguments, model).id) == ("", before.id)
    change(place)
    assert place.read(arguments, model).id != before.id


FOREIGN = {
    "object storage": ("s3://bucket/m", ()),
    "streamer": ("gs://bucket/m", ("--load-format", "runai_streamer")),
    "weights elsewhere": ("FOLDER/m", ("--model-weights", "s3://bucket/m")),
    "quantization of GGUF": ("org/m:Q4_K_M", ()),
    "a file of a repository": ("org/m/model.gguf", ()),
    "a branch that is nowhere": ("org/m", ("--revision", "none")),
    "a draft that is nowhere": ("FOLDER/m", ("-sc.model", "gpt2")),
    "a daemon": ("FOLDER/m", ("--load-format", "ipc_cache")),
    "other engines": ("FOLDER/m", ("--load-format=ModelExpress",)),
    "a plug-in": ("FOLDER/m", ("--load-format", "own")),
    "tensors elsewhere": (
        "FOLDER/m",
        (
            "--load-format=tensorizer",
            "--model-loader-extra-config",
            '{"tensorizer_uri": "s3://b/t"}',
        ),
    ),
}


@pytest.mark.parametrize(("model", "arguments"), FOREIGN.values(), ids=FOREIGN)
def test_of_what_is_read_elsewhere_the_agent_says_that_its_content_is_not_known(
    place: Place, model: str, arguments: tuple[str, ...]
) -> None:
    assert "not known to Cleave" in place.read(arguments, model).fault


@pytest.mark.parametrize("value", ["1", "true", "True", " TRUE "])
def test_a_commit_of_hugging_face_says_nothing_of_modelscope(place: Place, value: str) -> None:
    place.env["VLLM_USE_MODELSCOPE"] = value
    assert "not known to Cleave" in place.read((), "org/m").fault


@pytest.mark.parametrize("name", [f"m/{SHARD}", "m/config.json"])
def test_a_file_that_is_written_in_place_while_it_is_loaded_is_found(
    place: Place, name: str
) -> None:
    weights = place.read((), "FOLDER/m")
    write_in_place(place.folder / name)
    assert "has changed while it was loaded" in place.find_change(weights)


def test_a_file_that_is_touched_after_it_was_loaded_is_no_change(place: Place) -> None:
    weights = place.read((), "FOLDER/m")
    os.utime(place.folder / "m" / SHARD)
    (place.folder / "m" / SHARD).chmod(0o600)
    assert place.find_change(weights) == ""


def test_the_settings_within_a_large_file_are_read_as_a_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF has those of the model and the tokenizer before the tensors."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    size = (tensor_samples.MAX_HEAD_BYTES) * 3
    path = place.folder / "large.gguf"
    found = set()
    for offset in (0, 12_345, tensor_samples.MAX_HEAD_BYTES - 1, size - 1):
        with path.open("wb") as file:
            file.truncate(size)
            file.seek(offset)
            file.write(b"1")
        found.add(place.read((), "FOLDER/large.gguf").id)
    assert len(found) == 4


def test_of_two_names_of_one_folder_every_node_reads_the_same(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("m/original/weights.bin", "1")
    (place.folder / "m" / "again").symlink_to("original")
    scan, found = os.scandir, []
    for is_last_first in (False, True):
        monkeypatch.setattr(
            os, "scandir", lambda path, r=is_last_first: sorted(scan(path), key=str, reverse=r)
        )
        found.append(place.read((), "FOLDER/m").id)
    assert found[0] == found[1]


def test_a_cache_whose_files_are_not_those_of_the_commit_is_not_found(place: Place) -> None:
    """The limit: a repository is known by its commit, as far as its cache can be trusted."""
    before = place.read((), "org/m")
    BLOB(place)
    after = place.read((), "org/m")
    assert (after.id, after.fault) == (before.id, "")
