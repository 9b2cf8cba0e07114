"""Equal content has one fingerprint, and what training does to a model changes it."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave_worker.agent.weights import fingerprint, tensor_samples
from cleave_worker.agent.weights.fingerprint import FilesError, compute_fingerprint, list_files
from cleave_worker.agent.weights.tensor_samples import PIECE_BYTES, Tensor

NAMES = [f"model.layers.{number}.weight" for number in range(6)]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files above 64 KiB together are sampled, as those above 1 GiB are."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 64 << 10)


def hash_folder(path: Path) -> str:
    return compute_fingerprint(path, list_files(path), lambda share: None)


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, content in tensors.items():
        size = len(content)
        fields = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        header[name], offset = fields, offset + size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def make_tensors(seed: int = 0, size: int = 300_000) -> dict[str, bytes]:
    generator = random.Random(seed)
    tensors = {name: generator.randbytes(size + number) for number, name in enumerate(NAMES)}
    return tensors | {"norm": generator.randbytes(64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two shards, too large to be read as a whole."""
    model = tmp_path / "model"
    model.mkdir()
    tensors = list(make_tensors().items())
    write_safetensors(model / "model-1.safetensors", dict(tensors[:3]))
    write_safetensors(model / "model-2.safetensors", dict(tensors[3:]))
    (model / "config.json").write_text('{"model_type": "opt"}')
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "pytorch_model.bin").write_bytes(random.Random(7).randbytes(2_000_000))
    return model


def test_equal_content_has_the_same_fingerprint_elsewhere_later_and_behind_links(
    folder: Path, tmp_path: Path
) -> None:
    before = hash_folder(folder)
    copy = tmp_path / "nodes" / "other"
    copy.parent.mkdir()
    shutil.copytree(folder, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert hash_folder(copy) == before
    # As a cache of Hugging Face has them.
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in copy.iterdir():
        (linked / path.name).symlink_to(path)
    assert hash_folder(linked) == before
    (tmp_path / "current").symlink_to(folder)
    assert hash_folder(tmp_path / "current") == before


def test_the_order_in_which_a_file_system_lists_does_not_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, scan = hash_folder(folder), os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: sorted(scan(path), key=str, reverse=True))
    assert hash_folder(folder) == before


def test_what_engines_do_not_read_does_not_matter(folder: Path) -> None:
    before = hash_folder(folder)
    for name in ("README.md", "LICENSE", "LICENSE.txt", ".gitattributes", "figure.png", "a.lock"):
        (folder / name).write_text("x")
    for name in (".cache", ".git", "lost+found", "__pycache__"):
        (folder / name).mkdir()
        (folder / name / "x.json").write_text("x")
    assert hash_folder(folder) == before


def rename_shard(folder: Path) -> None:
    (folder / "model-1.safetensors").rename(folder / "model-3.safetensors")


def swap_shards(folder: Path) -> None:
    first, second = folder / "model-1.safetensors", folder / "model-2.safetensors"
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def swap_equal_tensors(folder: Path) -> None:
    tensors = make_tensors(size=200_000)
    one, other = NAMES[0], NAMES[1]
    tensors[one], tensors[other] = tensors[other][:200_000], tensors[one] + b"x"
    write_safetensors(folder / "model-1.safetensors", tensors)


def change_end(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def change_begin(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    path.write_bytes(b"\0" + path.read_bytes()[1:])


def cut_off(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def add_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


def add_to_subfolder(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "modeling.py").write_text("x = 1")


def edit(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    change.__name__ = f"edit_{name}"
    return change


@pytest.mark.parametrize(
    "change",
    [
        rename_shard,
        swap_shards,
        swap_equal_tensors,
        change_begin,
        change_end,
        cut_off,
        add_file,
        add_to_subfolder,
        edit("config.json", '{"model_type": "opu"}'),
        edit("tokenizer.json", '{"version": "1.1"}'),
        edit("chat_template.jinja", "{{ message }}"),
    ],
)
def test_any_kind_of_change_is_found(folder: Path, change: Callable[[Path], None]) -> None:
    before = hash_folder(folder)
    change(folder)
    assert hash_folder(folder) != before


@pytest.mark.parametrize("seed", range(20))
def test_a_merge_into_one_tensor_is_found(folder: Path, seed: int) -> None:
    """A merge or a fine-tune changes the values all over the tensors that it concerns."""
    generator, before = random.Random(seed), hash_folder(folder)
    tensors = dict(list(make_tensors().items())[:3])
    name = generator.choice(list(tensors))
    changed = bytearray(tensors[name])
    for place in range(0, len(changed), generator.choice((2, 64, 2048))):
        changed[place] ^= 1
    tensors[name] = bytes(changed)
    write_safetensors(folder / "model-1.safetensors", tensors)
    assert hash_folder(folder) != before


@pytest.mark.parametrize("seed", range(20))
def test_an_edit_of_neighbouring_rows_is_found(folder: Path, seed: int) -> None:
    """Rows that take two of the equal parts that are sampled, wherever they begin."""
    generator, before = random.Random(seed), hash_folder(folder)
    tensors = dict(list(make_tensors().items())[3:])
    name = generator.choice(NAMES[3:])
    size = len(tensors[name])
    length = 2 * -(-size // tensor_samples.count_tensor_pieces(len(NAMES) + 1))
    begin = generator.randrange(size - length)
    edited = generator.randbytes(length)
    tensors[name] = tensors[name][:begin] + edited + tensors[name][begin + length :]
    write_safetensors(folder / "model-2.safetensors", tensors)
    assert hash_folder(folder) != before


@given(st.binary(max_size=200), st.integers(0, 1 << 20))
def test_a_file_that_only_looks_like_safetensors_is_no_error(begin: bytes, length: int) -> None:
    content = struct.pack("<Q", length) + begin
    size = tensor_samples.read_header_size(content, len(content))
    if size:
        try:
            tensors = tensor_samples.parse_tensors(content[:size], len(content))
        except (ValueError, RecursionError):
            return
        assert all(0 <= each.offset <= len(content) for each in tensors)


@given(st.text(max_size=30), st.integers(0, 1 << 40), st.integers(1, 64))
def test_pieces_of_a_tensor_lie_within_it_one_in_each_part(
    name: str, size: int, count: int
) -> None:
    tensor = Tensor(name, 1000, size)
    pieces = tensor_samples.choose_tensor_pieces(tensor, count)
    assert pieces == tensor_samples.choose_tensor_pieces(tensor, count)
    ends = [(each.offset - 1000, each.offset - 1000 + each.size) for each in pieces]
    if size <= count * PIECE_BYTES:
        assert ends == [(0, size)]
        return
    for part, (begin, end) in enumerate(ends):
        assert part * size // count <= begin < end <= (part + 1) * size // count


@given(st.integers(0, 1 << 45), st.integers(1, 20_000))
def test_pieces_of_another_file_have_its_begin_and_its_end(size: int, num_files: int) -> None:
    pieces = tensor_samples.choose_file_pieces(size, num_files)
    assert pieces[0].offset == 0
    assert pieces[-1].offset + pieces[-1].size == size
    head = min(tensor_samples.MAX_HEAD_BYTES, tensor_samples.MAX_HEADS_BYTES // num_files)
    assert pieces[0].size >= min(size, head)
    sampled = tensor_samples.count_file_pieces(num_files) * PIECE_BYTES
    assert sum(each.size for each in pieces) <= head + sampled


def test_large_models_take_few_reads() -> None:
    """DeepSeek-V3 has 91,991 tensors, Llama 3.1 405B 1,138."""
    for tensors in (1, 300, 1_138, 91_991):
        read = tensors * tensor_samples.count_tensor_pieces(tensors) * PIECE_BYTES
        assert read < 1 << 30
    for files in (1, 100, 20_000):
        pieces = tensor_samples.choose_file_pieces(1 << 34, files)
        assert sum(each.size for each in pieces) * files < 22 << 30


def test_a_file_alone_is_known_by_its_content(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"1"), ("b.gguf", b"1"), ("c.gguf", b"2")):
        (tmp_path / name).write_bytes(content)
    same, other, changed = (hash_folder(tmp_path / f"{name}.gguf") for name in "abc")
    assert same == other != changed


def test_a_folder_that_contains_itself_is_read_once(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    assert {each.name for each in list_files(folder)} == {
        path.name for path in folder.iterdir() if path.name != "loop"
    }


@pytest.mark.parametrize("link", ["a", "current"])
def test_a_link_that_is_moved_to_another_folder_of_the_model_is_found(
    folder: Path, link: str
) -> None:
    for version in ("b1", "b2"):
        (folder / version).mkdir()
        (folder / version / "adapter.bin").write_text(version)
    (folder / link).symlink_to("b1")
    before, files = hash_folder(folder), list_files(folder)
    (folder / link).unlink()
    (folder / link).symlink_to("b2")
    assert list_files(folder) != files
    assert hash_folder(folder) != before


def test_a_folder_with_too_many_files_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "MAX_FILES", 3)
    with pytest.raises(FilesError, match="more than 3 files"):
        list_files(folder)


def test_links_between_folders_end_the_listing(folder: Path) -> None:
    """Twelve folders that each contain the others have more names than can be listed."""
    names = [f"f{number}" for number in range(12)]
    for name in names:
        (folder / name).mkdir()
        for other in names:
            (folder / name / other).symlink_to(folder / other)
    with pytest.raises(FilesError, match="files and folders"):
        list_files(folder)


def test_a_reading_ends_when_its_check_raises_and_reports_progress(folder: Path) -> None:
    shares: list[float] = []
    compute_fingerprint(folder, list_files(folder), shares.append)
    assert max(shares) == 1.0

    def stop(share: float) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        compute_fingerprint(folder, list_files(folder), stop)


def test_a_listing_shows_each_write_to_a_file(folder: Path) -> None:
    before = list_files(folder)
    assert list_files(folder) == before
    path = folder / "model-1.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    assert list_files(folder) != before
