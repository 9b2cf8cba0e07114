"""Clients that others wrote, unmodified: LangChain, LiteLLM, curl, vLLM's own benchmark.

Those of Python run in an environment of their own (e2e/clients), which the first test sets up.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.support.clients_environment import CLIENTS, ROOT, run
from e2e.support.deployments import Deployment, deployed, emulated, idle, until

MODEL = "facebook/opt-13b"
"""As the documents name it."""
GATEWAY = "http://127.0.0.1:8080"
PAGES = ["README.md", "docs/serve.md", "docs/install.md"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    manifest = emulated("chat", 1, 1)
    manifest["spec"]["model"]["servedName"] = MODEL
    with deployed(manifest, tmp_path_factory.mktemp("clients"), 180) as deployment:
        yield deployment


@pytest.mark.parametrize("client", ["langchain_client.py", "litellm_client.py"])
def test_clients_for_python_talk_as_to_any_other_server(
    chat: Deployment, clients: Path, client: str
) -> None:
    run(str(clients / "python"), str(CLIENTS / client), chat.url, MODEL)
    until(lambda: idle(chat), 60, "the engines are free")


def examples() -> Iterator[tuple[str, str]]:
    """(page, command) for each curl of the documents that asks a gateway."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        for place in re.finditer(rf"^curl [^\n]*{re.escape(GATEWAY)}", text, re.MULTILINE):
            lines = text[place.start() :].splitlines()
            command = lines.pop(0)
            while command.count("'") % 2 or command.endswith("\\"):
                command += "\n" + lines.pop(0)
            yield page, command


@pytest.mark.parametrize(("page", "command"), list(examples()))
def test_the_documents_curl_commands_work_as_written(
    chat: Deployment, page: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time=30\n")
    command = command.replace(GATEWAY, chat.url)
    assert run("bash", "-c", command, CURL_HOME=str(tmp_path), HOME=str(tmp_path))


def test_vllms_benchmark_loses_no_request(
    chat: Deployment, tiny_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    script = str(CLIENTS / "vllm_bench.py")
    arguments = (chat.url, MODEL, str(tiny_model), str(tmp_path))
    run(sys.executable, script, *arguments, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    for backend in ("openai", "openai-chat"):
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (40, 0)
        assert result["total_output_tokens"] == 40 * 16
    until(lambda: idle(chat), 60, "the engines are free")
