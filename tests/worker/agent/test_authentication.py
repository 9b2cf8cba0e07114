"""Who may call an agent: over a real server, with tokens as the API server signs them."""

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc.credentials import AUDIENCE, METADATA_KEY, TOKEN_ENV, build_metadata
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent import authentication
from cleave_worker.agent.authentication import (
    AuthenticationError,
    ServiceAccountTokens,
    SharedToken,
    parse_keys,
)
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.instance import WorkerInstance
from cleave_worker.agent.service import AgentServer

ACCOUNT = "system:serviceaccount:team:chat-discovery"
NOW_S = 1_800_000_000.0
CLAIMS = {"aud": [AUDIENCE], "sub": ACCOUNT, "exp": NOW_S + 600, "nbf": NOW_S - 600}
RSA_KEY = rsa.generate_private_key(65_537, 2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def sign(
    claims: dict[str, Any],
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey = RSA_KEY,
    **header: str,
) -> str:
    is_rsa = isinstance(key, rsa.RSAPrivateKey)
    kind = {"alg": "RS256", "kid": "r"} if is_rsa else {"alg": "ES256", "kid": "e"}
    text = ".".join(encode(json.dumps(each).encode()) for each in ({**kind, **header}, claims))
    if isinstance(key, rsa.RSAPrivateKey):
        return f"{text}.{encode(key.sign(text.encode(), padding.PKCS1v15(), SHA256()))}"
    pair = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(SHA256())))
    return f"{text}.{encode(b''.join(each.to_bytes(32) for each in pair))}"


def build_key_set() -> dict[str, Any]:
    r, e = RSA_KEY.public_key().public_numbers(), EC_KEY.public_key().public_numbers()
    public = {"kty": "RSA", "kid": "r", "n": encode(r.n.to_bytes(256)), "e": encode(b"\1\0\1")}
    curve = {"kty": "EC", "kid": "e", "crv": "P-256"}
    point = {"x": encode(e.x.to_bytes(32)), "y": encode(e.y.to_bytes(32))}
    return {"keys": [public, {**curve, **point}, {"kty": "OKP", "kid": "o", "x": "AA"}]}


class ApiServer:
    """The API server's keys, and how often they were asked for."""

    def __init__(self) -> None:
        self.requests = 0
        self.is_away = False

    async def fetch_keys(self) -> dict[str, Any]:
        self.requests += 1
        if self.is_away:
            raise OSError("away")
        return parse_keys(build_key_set())


def make_tokens(server: ApiServer) -> ServiceAccountTokens:
    return ServiceAccountTokens([ACCOUNT], server.fetch_keys, lambda: NOW_S)


@pytest.mark.parametrize("key", [RSA_KEY, EC_KEY], ids=["RSA", "EC"])
async def test_a_token_of_a_trusted_account_is_accepted(key: Any) -> None:
    server = ApiServer()
    tokens = make_tokens(server)
    for _ in range(3):
        await tokens.verify(sign(CLAIMS, key))
    server.is_away = True
    await tokens.verify(sign({**CLAIMS, "aud": AUDIENCE}, key))
    assert server.requests == 1


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (sign({**CLAIMS, "sub": "system:serviceaccount:team:other"}), "other has no access"),
        (sign({**CLAIMS, "aud": ["https://kubernetes.default.svc"]}), "not for cleave.dev/agents"),
        (sign({**CLAIMS, "exp": NOW_S - 61}), "expired"),
        (sign({**CLAIMS, "nbf": NOW_S + 61}), "expired"),
        (sign(CLAIMS, rsa.generate_private_key(65_537, 2_048)), "not signed by the API server"),
        (sign(CLAIMS)[:-4] + "AAAA", "not signed by the API server"),
        (sign(CLAIMS, alg="none"), "signed by none"),
        (sign(CLAIMS, alg="HS256"), "signed by HS256"),
        (sign(CLAIMS, EC_KEY, kid="r"), "signed by ES256"),
        (sign(CLAIMS, kid="unknown"), "unknown key"),
        (sign({"sub": ACCOUNT}), "not one of a service account"),
        ("", "not one of a service account"),
        ("a.b.c", "not one of a service account"),
        (".".join(map(encode, (b"[" * 10_000, b"{}", b"x"))), "not one of a service account"),
    ],
)
async def test_other_tokens_are_refused_in_words(token: str, fault: str) -> None:
    with pytest.raises(AuthenticationError, match=fault) as caught:
        await make_tokens(ApiServer()).verify(token)
    assert not token or token not in str(caught.value)


async def test_unknown_keys_do_not_flood_the_api_server() -> None:
    server = ApiServer()
    tokens = make_tokens(server)
    for number in range(100):
        with pytest.raises(AuthenticationError):
            await tokens.verify(sign(CLAIMS, kid=f"k{number}"))
    assert server.requests == 1


async def test_keys_are_read_again_once_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_REFETCH_S", 0.0)
    server = ApiServer()
    server.is_away = True
    tokens = make_tokens(server)
    with pytest.raises(AuthenticationError, match="unknown key"):
        await tokens.verify(sign(CLAIMS))
    server.is_away = False
    await tokens.verify(sign(CLAIMS))


@asynccontextmanager
async def serving(config: AgentConfig, token_file: Path) -> AsyncIterator[grpc.aio.Channel]:
    async def refuse(*_: object) -> Any:
        raise AssertionError

    instance = WorkerInstance(config)
    server = AgentServer(instance, refuse, refuse, config.address, SharedToken(token_file))
    await server.start()
    async with grpc.aio.insecure_channel(config.address) as channel:
        yield channel
    instance.end()
    await server.stop(0)


async def test_every_method_of_the_agent_asks_for_the_token_and_probes_do_not(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("right\n")
    async with serving(config, token_file) as channel:
        agent = agent_pb2_grpc.AgentStub(channel)
        for metadata in ((), ((METADATA_KEY, "Bearer wrong"),), ((METADATA_KEY, "right"),)):
            for call, request in (
                (agent.Health, agent_pb2.HealthRequest()),
                (agent.SetRole, agent_pb2.SetRoleRequest(role=1, epoch=9)),
                (agent.Drain, agent_pb2.DrainRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request, timeout=5, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            events = agent.Watch(agent_pb2.WatchRequest(), timeout=5, metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(events))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setenv(TOKEN_ENV, str(token_file))
        answer = await agent.Health(agent_pb2.HealthRequest(), timeout=5, metadata=build_metadata())
        assert answer.registration.instance == config.name
        async for event in agent.Watch(
            agent_pb2.WatchRequest(), timeout=5, metadata=build_metadata(token_file)
        ):
            assert event.HasField("registration")
            break
        probe = health_pb2_grpc.HealthStub(channel)
        await probe.Check(health_pb2.HealthCheckRequest(), timeout=5)


async def test_a_token_costs_less_than_a_millisecond() -> None:
    tokens, token = make_tokens(ApiServer()), sign(CLAIMS)
    await tokens.verify(token)
    started = time.thread_time()
    for _ in range(100):
        await tokens.verify(token)
    assert (time.thread_time() - started) / 100 < 0.001
