"""Nothing that a client sends reaches what vLLM's connectors read, and malformed values end no
engine: over NIXL one request with a number in place of transfer parameters did."""

import httpx
import pytest

from e2e.support.deployments import Deployment
from e2e.support.engine_keys import headers_for
from e2e.support.vllm_prompts import CASES, TIMEOUT_S, ask, engine_url
from tests.support.json_traps import BodyGenerator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MALFORMED = [0, 1.5, True, "x", [], [1], {"do_remote_prefill": 1}, {"remote_block_ids": "x"}]
SMUGGLED = [
    b'"vllm_xargs":{"x":NaN,"kv_transfer_params":0}',
    b'"vllm_xargs":{"kv_transfer_params":0,"x":"\\ud800"}',
    b'"vllm_xargs":{"\xed\xa0\x80":1,"kv_transfer_params":0}',
    b'"vllm_xargs":{"kv_transfer_params":0},"vllm_xargs":{"x":1,"kv_transfer_params":0}',
    b'"kv_transfer_params":0,"kv_transfer_params":{}',
    b'"kv\\u005ftransfer_params":0',
    b'"ec_transfer_params":0',
]


def get_boots(pair: Deployment) -> dict[str, str]:
    return {name: registration.boot_id for name, registration in pair.instances().items()}


@pytest.mark.parametrize("padding", [0, 2 << 20], ids=["small", "large"])
def test_no_spelling_reaches_engines(vllm_pair: Deployment, padding: int) -> None:
    boots = get_boots(vllm_pair)
    generator = BodyGenerator(11)
    bodies = [
        b'{"model":"tiny","prompt":"a b","max_tokens":2,%b%b}'
        % (field, b',"user":"%b"' % (b"x" * padding) if padding else b"")
        for field in SMUGGLED
    ] + [generator.build_body() for _ in range(0 if padding else 60)]
    with httpx.Client(base_url=vllm_pair.url, timeout=TIMEOUT_S) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            for body in bodies:
                fields = {"content-type": "application/json"}
                response = client.post(path, content=body, headers=fields)
                assert response.status_code in (200, 400, 404, 501), (path, body[:200])
    assert len(ask(vllm_pair.url, CASES[0]).tokens) > 0
    assert get_boots(vllm_pair) == boots


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_itself_refuses_malformed_ones(vllm_pair: Deployment, role: str) -> None:
    boots, url = get_boots(vllm_pair), engine_url(vllm_pair, role)
    for params in MALFORMED:
        for field in ({"kv_transfer_params": params}, {"vllm_xargs": {"kv_transfer_params": 0}}):
            body = {"model": "tiny", "prompt": "a b", "max_tokens": 2} | field
            response = httpx.post(
                f"{url}/v1/completions", json=body, headers=headers_for(url), timeout=TIMEOUT_S
            )
            assert response.status_code in (200, 400), (field, response.text)
    assert len(ask(vllm_pair.url, CASES[0]).tokens) > 0
    assert get_boots(vllm_pair) == boots
