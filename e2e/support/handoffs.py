"""Hand-offs and pulls of prefixes between vLLM engines by Cleave's connector: made, altered, and
what came of them.

Used by test_vllm_connector.py and, with larger numbers, by benchmarks/kv/faults.py.
"""

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from cleave.rpc.engine_key import compute_kv_key
from cleave_worker.transfer.transport import Transport

from e2e.support.deployments import Deployment, start_fast, tiny_vllm
from e2e.support.engine_keys import headers_for
from e2e.support.vllm_prompts import TIMEOUT_S, Case, ask, engine_url, make_case, metric
from tests.support.kv_server_process import OwnerProcess

RAN = "vllm:iteration_tokens_total_sum"
LEASE_S = 20
PREFILL_ORDER = {"do_remote_decode": True, "do_remote_prefill": False}


def tiny_with_connector(
    model: Path, way: str, *, checksums: bool, **engine: object
) -> dict[str, object]:
    """A manifest for a prefill and a decode engine between which KV moves this way.

    `engine`: further fields of spec.engine.
    """
    extra = {"transports": [way], "checksums": checksums, "kv_lease_duration": LEASE_S}
    settings = {"kv_connector_extra_config": extra}
    args = ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(settings)]
    engine |= {"connector": "Cleave", "args": args}
    if way == Transport.NIXL:
        # Here is no card that reads memory by itself.
        engine |= {"env": [{"name": "UCX_TLS", "value": "all"}]}
    return tiny_vllm(model, engine=start_fast(**engine))


def lost(url: str) -> dict[str, float]:
    """Hand-offs that came to nothing, by reason, those that are zero left out."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines():
        if line.startswith("cleave_kv_lost_total{") and not line.endswith(" 0.0"):
            reason = line.split('reason="')[1].split('"')[0]
            found[reason] = found.get(reason, 0) + float(line.split()[-1])
    return found


def is_free(vllm: Deployment) -> bool:
    """Whether no engine holds blocks; each gets a request, for an idle one updates no count."""
    case = Case(0, 1, chat=False, stream=False)
    urls = [engine_url(vllm, role) for role in ("prefill", "decode")]
    for url in urls:
        ask(url, case)
    return not any(metric(url, "vllm:kv_cache_usage_perc") for url in urls)


def name_source(vllm: Deployment, **changed: object) -> dict[str, object]:
    """The decode engine, as the gateway names it to a prefill engine."""
    decoding = vllm.instances()["tiny-decode-0"]
    host = urlsplit(decoding.engine_url).hostname
    key = compute_kv_key(decoding.engine_key)
    place = {"engine_id": decoding.boot_id, "host": host, "port": decoding.prefix_port, "key": key}
    return place | changed


def outcomes(url: str) -> dict[str, float]:
    """Pulls of prefixes by their outcome."""
    name = "cleave_prefix_pulls_total{"
    lines = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    samples = [line for line in lines if line.startswith(name) and not line.endswith(" 0.0")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in samples}


def prefill(url: str, case: Case, request_id: str) -> dict[str, Any]:
    """The hand-off of a prompt."""
    answer = post(url, case, request_id, max_tokens=1, kv_transfer_params=PREFILL_ORDER)
    handed: dict[str, Any] = answer["kv_transfer_params"]
    return handed


def decode(url: str, case: Case, handed: dict[str, Any] | None, request_id: str) -> list[int]:
    """Tokens that a decode engine gives with a hand-off."""
    answer = post(url, case, request_id, kv_transfer_params=handed)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def post(url: str, case: Case, request_id: str, **fields: object) -> dict[str, Any]:
    """An engine's answer to a case with these fields, in one piece."""
    body = {**case.body, "stream": False, **fields}
    body.pop("stream_options", None)
    headers = {"X-Request-Id": request_id, **headers_for(url)}
    response = httpx.post(url + case.path, json=body, timeout=TIMEOUT_S, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@dataclass(frozen=True)
class Fault:
    """A hand-off that must not be used, and the reason that is counted for it."""

    reason: str
    change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None]
    """Own hand-off and that of another prompt -> what the decode engine is given."""


def altered(handed: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {**handed, "cleave": {**handed["cleave"], **fields}}


def of_other_boot(handed: dict[str, Any]) -> dict[str, Any]:
    return {**altered(handed, boot_id="before"), "remote_engine_id": "before"}


def of_other_request(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """It claims the requested prompt, and names KV of another one."""
    return altered(other, prompt_digest=own["cleave"]["prompt_digest"], num_tokens=10**6)


def faults(talker: str, foreign: OwnerProcess) -> dict[str, Fault]:
    """By name; `talker` is a port where nonsense is answered, `foreign` an owner of other KV."""
    address = ("127.0.0.1", foreign.port)
    other_kv = {"boot_id": foreign.boot_id, "key": foreign.key, "addresses": [address]}
    dead, nonsense = ("127.0.0.1", 1), ("127.0.0.1", int(talker))
    return {
        "swapped": Fault("prompt", lambda _, other: altered(other, num_tokens=10**6)),
        "swapped and disguised": Fault("prompt", of_other_request),
        "stale epoch": Fault("epoch", lambda own, _: altered(own, epoch=10**6)),
        "stale boot": Fault("boot", lambda own, _: of_other_boot(own)),
        "unlike halves": Fault("malformed", lambda own, _: altered(own, boot_id="before")),
        "too short": Fault("malformed", lambda own, _: altered(own, num_tokens=3)),
        "without fields": Fault("malformed", lambda own, _: {**own, "cleave": {}}),
        "of vLLM's own connector": Fault(
            "malformed", lambda own, _: {k: v for k, v in own.items() if k != "cleave"}
        ),
        "dead peer": Fault("peer_lost", lambda own, _: altered(own, addresses=[dead])),
        "nonsense": Fault("peer_lost", lambda own, _: altered(own, addresses=[nonsense])),
        "no rank": Fault("layout", lambda own, _: altered(own, addresses=[])),
        "wrong layout": Fault(
            "layout",
            lambda own, _: {**altered(own, **other_kv), "remote_engine_id": foreign.boot_id},
        ),
    }


@dataclass(frozen=True)
class Given:
    """A fault that a decode engine was given, and what it made of it."""

    name: str
    reason: str
    tokens: list[int]
    expected: list[int]


def give(vllm: Deployment, kinds: Mapping[str, Fault], cases: Iterator[Case]) -> Iterator[Given]:
    """Each kind of fault once, with two prompts that no engine has seen."""
    for name, fault in kinds.items():
        yield give_one(vllm, name, fault, next(cases), next(cases))


def give_one(vllm: Deployment, name: str, fault: Fault, case: Case, other: Case) -> Given:
    """A fault in the hand-off of `case`."""
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    expected = ask(source, case).tokens
    own = prefill(source, case, f"own-{case.number}")
    given = fault.change(own, prefill(source, other, f"other-{case.number}"))
    tokens = decode(decoding, case, given, f"own-{case.number}")
    return Given(name, fault.reason, tokens, expected)


def make_cases() -> Iterator[Case]:
    """New prompts of 150 to 550 tokens, without end."""
    return map(make_case, itertools.cycle(range(150, 551, 40)))


@contextmanager
def talking_nonsense() -> Iterator[str]:
    """A port where every connection gets nonsense."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            with suppress(OSError):
                while True:
                    connected, _ = listening.accept()
                    with connected:
                        connected.sendall(b"\0\0\0\3abc")

        threading.Thread(target=talk, daemon=True).start()
        yield str(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def owning_other_kv() -> Iterator[OwnerProcess]:
    """An owner whose KV has another layout."""
    owner = OwnerProcess()
    yield owner
    owner.end()
