"""Tokens as the API server signs them are accepted, all others refused."""

import base64
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cleave.rpc.credentials import AUDIENCE
from cleave_worker.agent import service_account_tokens
from cleave_worker.agent.authentication import (
    AccessDeniedError,
    AgentMethod,
    AuthenticationError,
)
from cleave_worker.agent.service_account_tokens import ServiceAccountTokens, parse_keys

ACCOUNT = "system:serviceaccount:team:chat-discovery"
PEER = "system:serviceaccount:team:chat-workers"
NOW_S = time.time()
"""When the tests are collected; they may run much later."""
DAY_S = 86_400.0
CLAIMS = {"aud": [AUDIENCE], "sub": ACCOUNT, "exp": NOW_S + DAY_S, "nbf": NOW_S - DAY_S}
RSA_KEY = rsa.generate_private_key(65_537, 2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def sign(claims: dict[str, Any], key: Any = RSA_KEY, **header: str) -> str:
    kind = ("RS256", "r") if key is not EC_KEY else ("ES256", "e")
    algorithm, key_id = header.get("alg", kind[0]), header.get("kid", kind[1])
    secret = {"none": None, "HS256": "x" * 32}.get(algorithm, key)
    return jwt.encode(claims, secret, algorithm, headers={"kid": key_id})


def build_key_set() -> dict[str, Any]:
    r, e = RSA_KEY.public_key().public_numbers(), EC_KEY.public_key().public_numbers()
    public = {"kty": "RSA", "kid": "r", "n": encode(r.n.to_bytes(256)), "e": encode(b"\1\0\1")}
    curve = {"kty": "EC", "kid": "e", "crv": "P-256"}
    point = {"x": encode(e.x.to_bytes(32)), "y": encode(e.y.to_bytes(32))}
    return {"keys": [public, {**curve, **point}, {"kty": "OKP", "kid": "o", "x": "AA"}]}


class ApiServer:
    """The API server's keys, and how often they were fetched."""

    def __init__(self) -> None:
        self.requests = 0
        self.is_away = False

    async def fetch_keys(self) -> dict[str, Any]:
        self.requests += 1
        if self.is_away:
            raise OSError("away")
        return parse_keys(build_key_set())


def make_tokens(server: ApiServer) -> ServiceAccountTokens:
    return ServiceAccountTokens([ACCOUNT], [PEER], "chat-prefill-x7", server.fetch_keys)


@pytest.mark.parametrize("key", [RSA_KEY, EC_KEY], ids=["RSA", "EC"])
async def test_a_token_of_a_trusted_account_is_accepted(key: Any) -> None:
    server = ApiServer()
    tokens = make_tokens(server)
    for _ in range(3):
        await tokens.verify(sign(CLAIMS, key), AgentMethod.SET_ROLE)
    server.is_away = True
    await tokens.verify(sign({**CLAIMS, "aud": AUDIENCE}, key), AgentMethod.SET_ROLE)
    assert server.requests == 1


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (sign({**CLAIMS, "sub": "system:serviceaccount:team:other"}), "other has no access"),
        (
            sign({**CLAIMS, "aud": ["https://kubernetes.default.svc"]}),
            "is not for cleave.dev/agents",
        ),
        (sign({**CLAIMS, "exp": NOW_S - 120}), "expired"),
        (sign({**CLAIMS, "nbf": NOW_S + DAY_S}), "expired"),
        (sign(CLAIMS, rsa.generate_private_key(65_537, 2_048)), "not signed by the API server"),
        (sign(CLAIMS)[:-4] + "AAAA", "not signed by the API server"),
        (sign(CLAIMS, alg="none"), "not signed by"),
        (sign(CLAIMS, alg="HS256"), "not signed by"),
        (sign(CLAIMS, EC_KEY, kid="r"), "not signed by"),
        (sign(CLAIMS, kid="unknown"), "unknown key"),
        (sign({"sub": ACCOUNT}), "not one of a service account"),
        ("", "not one of a service account"),
        ("a.b.c", "not one of a service account"),
        (".".join(map(encode, (b"[" * 10_000, b"{}", b"x"))), "not one of a service account"),
    ],
)
async def test_other_tokens_are_refused_in_words(token: str, fault: str) -> None:
    with pytest.raises(AuthenticationError, match=fault) as caught:
        await make_tokens(ApiServer()).verify(token, AgentMethod.SET_ROLE)
    assert not token or token not in str(caught.value)


async def test_unknown_keys_do_not_flood_the_api_server() -> None:
    server = ApiServer()
    tokens = make_tokens(server)
    for number in range(100):
        with pytest.raises(AuthenticationError):
            await tokens.verify(sign(CLAIMS, kid=f"k{number}"), AgentMethod.SET_ROLE)
    assert server.requests == 1


async def test_keys_are_read_again_once_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_account_tokens, "_FIRST_FETCH_S", 0.0)
    server = ApiServer()
    server.is_away = True
    tokens = make_tokens(server)
    with pytest.raises(AuthenticationError, match="unknown key"):
        await tokens.verify(sign(CLAIMS), AgentMethod.SET_ROLE)
    server.is_away = False
    await tokens.verify(sign(CLAIMS), AgentMethod.SET_ROLE)


async def test_a_token_costs_less_than_a_millisecond() -> None:
    tokens, token = make_tokens(ApiServer()), sign(CLAIMS)
    await tokens.verify(token, AgentMethod.SET_ROLE)
    started = time.thread_time()
    for _ in range(100):
        await tokens.verify(token, AgentMethod.SET_ROLE)
    assert (time.thread_time() - started) / 100 < 0.001


def sign_as_worker(pod: object) -> str:
    return sign({**CLAIMS, "sub": PEER, "kubernetes.io": {"namespace": "team", "pod": pod}})


async def test_a_worker_may_ask_for_the_health_of_another_and_nothing_else() -> None:
    tokens = make_tokens(ApiServer())
    token = sign_as_worker({"name": "chat-decode-k2"})
    await tokens.verify(token, AgentMethod.HEALTH)
    for method in set(AgentMethod) - {AgentMethod.HEALTH}:
        with pytest.raises(AccessDeniedError, match="may not call"):
            await tokens.verify(token, method)


@pytest.mark.parametrize(
    ("pod", "may_drain"),
    [
        ({"name": "chat-prefill-x7-1"}, True),
        ({"name": "chat-prefill-x7-12"}, True),
        ({"name": "chat-prefill-x7"}, False),
        ({"name": "chat-prefill-x7-1-1"}, False),
        ({"name": "chat-prefill-x7-1\n"}, False),
        ({"name": "chat-prefill-x8-1"}, False),
        ({"name": 1}, False),
        ({}, False),
        (None, False),
        ("chat-prefill-x7-1", False),
    ],
)
async def test_only_a_further_pod_of_the_instance_may_drain_it(
    pod: object, may_drain: bool
) -> None:
    tokens = make_tokens(ApiServer())
    if may_drain:
        await tokens.verify(sign_as_worker(pod), AgentMethod.DRAIN)
        with pytest.raises(AccessDeniedError):
            await tokens.verify(sign_as_worker(pod), AgentMethod.SET_ROLE)
    else:
        with pytest.raises(AccessDeniedError):
            await tokens.verify(sign_as_worker(pod), AgentMethod.DRAIN)


async def test_only_pods_of_the_instance_join_its_data_parallel_ranks() -> None:
    tokens = make_tokens(ApiServer())
    await tokens.verify(sign_as_worker({"name": "chat-prefill-x7-1"}), AgentMethod.JOIN_GANG)
    with pytest.raises(AccessDeniedError):
        await tokens.verify(sign_as_worker({"name": "chat-prefill-x8-1"}), AgentMethod.JOIN_GANG)
    # A gateway, which may call everything else.
    with pytest.raises(AuthenticationError, match="has no access"):
        await tokens.verify(sign(CLAIMS), AgentMethod.JOIN_GANG)
