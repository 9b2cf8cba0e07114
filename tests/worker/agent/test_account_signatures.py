"""Calls that are signed as a trusted account, for this agent, are accepted; all others are not."""

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cleave.rpc.account_identity import (
    AccountIdentity,
    build_caller_audience,
    export_public_key,
    split_credential,
)
from cleave.rpc.credentials import build_audience
from cleave_worker.agent import account_signatures
from cleave_worker.agent.account_signatures import AccountSignatures
from cleave_worker.agent.authentication import (
    AccessDeniedError,
    AgentMethod,
    AuthenticationError,
)

from tests.support.account_tokens import TokenIssuer, encode

ACCOUNT = "system:serviceaccount:team:chat-gateways-1"
PEER = "system:serviceaccount:team:chat-workers-1"
POD = "uid-of-this-agent"
DAY_S = 86_400.0
RSA_KEY = rsa.generate_private_key(65_537, 2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
CALLER_KEY = ec.generate_private_key(ec.SECP256R1())
PUBLIC = export_public_key(CALLER_KEY)


def sign_token(key: Any = RSA_KEY, *, header: Mapping[str, str] = {}, **claims: object) -> str:
    """A token of ACCOUNT that confirms PUBLIC, as the API server with `key` issues it."""
    now = time.time()
    usual = {"aud": [build_caller_audience(PUBLIC)], "sub": ACCOUNT, "iat": now, "nbf": now}
    payload = {**usual, "exp": now + 3_600, **claims}
    kind = ("RS256", "r") if key is not EC_KEY else ("ES256", "e")
    algorithm, key_id = header.get("alg", kind[0]), header.get("kid", kind[1])
    secret = {"none": None, "HS256": "x" * 32}.get(algorithm, key)
    named = {k: v for k, v in payload.items() if v is not None}
    return jwt.encode(named, secret, algorithm, headers={"kid": key_id})


def sign_call(
    key: Any = CALLER_KEY, *, header: Mapping[str, Any] | None = None, **claims: object
) -> str:
    """The signature of a call of this agent."""
    payload = {"aud": build_audience(POD), "iat": time.time(), **claims}
    named = {k: v for k, v in payload.items() if v is not None}
    algorithm = "HS256" if isinstance(key, str) else "ES256"
    return jwt.encode(named, key, algorithm, headers={"jwk": PUBLIC} if header is None else header)


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

    async def fetch_keys(self) -> Mapping[str, jwt.PyJWK]:
        self.requests += 1
        if self.is_away:
            raise OSError("away")
        return account_signatures.parse_keys(build_key_set())


def make_agent(server: ApiServer | TokenIssuer, pod_uid: str = POD) -> AccountSignatures:
    return AccountSignatures([ACCOUNT], [PEER], "chat-prefill-x7", pod_uid, server.fetch_keys)


@pytest.mark.parametrize("key", [RSA_KEY, EC_KEY], ids=["RSA", "EC"])
async def test_a_call_of_a_trusted_account_is_accepted(key: Any) -> None:
    server = ApiServer()
    agent = make_agent(server)
    for _ in range(3):
        await agent.verify(f"{sign_token(key)}~{sign_call()}", AgentMethod.SET_ROLE)
    server.is_away = True
    text = sign_token(key, aud=build_caller_audience(PUBLIC))
    await agent.verify(f"{text}~{sign_call()}", AgentMethod.SET_ROLE)
    assert server.requests == 1


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (sign_token(sub="system:serviceaccount:team:other"), "other has no access"),
        (sign_token(aud=["https://kubernetes.default.svc"]), "confirms another key"),
        # Of earlier versions: one for all agents.
        (sign_token(aud=["cleave.dev/agents"]), "confirms another key"),
        (sign_token(exp=time.time() - 120, iat=time.time() - 3_600), "expired"),
        (sign_token(nbf=time.time() + DAY_S), "expired"),
        (sign_token(exp=time.time() + DAY_S), "is for 86400 s: 3720 at most"),
        (sign_token(exp=time.time() + 3_600, iat=time.time() - DAY_S), "at most"),
        (sign_token(rsa.generate_private_key(65_537, 2_048)), "not signed by the API server"),
        (sign_token()[:-4] + "AAAA", "not signed by the API server"),
        (sign_token(header={"alg": "none"}), "not signed by"),
        (sign_token(header={"alg": "HS256"}), "not signed by"),
        (sign_token(EC_KEY, header={"kid": "r"}), "not signed by"),
        (sign_token(header={"kid": "unknown"}), "unknown key"),
        (sign_token(exp=None), "not one of a service account"),
        (sign_token(iat=None), "not one of a service account"),
        (sign_token(iat="soon"), "not one of a service account"),
        ("", "not one of a service account"),
        ("a.b.c", "not one of a service account"),
        (".".join(map(encode, (b"[" * 10_000, b"{}", b"x"))), "not one of a service account"),
    ],
)
async def test_other_tokens_are_refused_in_words(token: str, fault: str) -> None:
    with pytest.raises(AuthenticationError, match=fault) as caught:
        await make_agent(ApiServer()).verify(f"{token}~{sign_call()}", AgentMethod.SET_ROLE)
    assert not token or token not in str(caught.value)


OTHER_KEY = ec.generate_private_key(ec.SECP256R1())
UNUSABLE = "is not signed as a service account"


@pytest.mark.parametrize(
    ("prove", "fault"),
    [
        # A stolen token without its key: signed with another one, shown or not.
        (lambda: sign_call(OTHER_KEY), UNUSABLE),
        (
            lambda: sign_call(OTHER_KEY, header={"jwk": export_public_key(OTHER_KEY)}),
            "confirms another",
        ),
        (lambda: sign_call(aud=build_audience("uid-of-a-sibling")), "for another agent"),
        (lambda: sign_call(aud=build_audience("10.0.0.1:9000")), "for another agent"),
        (lambda: sign_call(aud="cleave.dev/agents"), "for another agent"),
        (lambda: sign_call(aud=None), UNUSABLE),
        (lambda: sign_call(iat=None), UNUSABLE),
        (lambda: sign_call(iat=time.time() - 30), "before this agent started"),
        (lambda: sign_call(iat=time.time() - 3_600), "was signed 3600 s ago"),
        (lambda: sign_call(iat=time.time() + DAY_S), "was signed -8"),
        (lambda: sign_call(iat=float("nan")), "was signed nan s ago"),
        (lambda: sign_call(iat=float("inf")), "was signed -inf s ago"),
        (lambda: sign_call(iat="now"), UNUSABLE),
        (lambda: sign_call(header={}), UNUSABLE),
        (lambda: sign_call(header={"jwk": {}}), UNUSABLE),
        (lambda: sign_call(header={"jwk": [1]}), UNUSABLE),
        (lambda: sign_call(header={"jwk": "x"}), UNUSABLE),
        (lambda: sign_call(header={"jwk": {**PUBLIC, "crv": "P-384"}}), UNUSABLE),
        (lambda: sign_call(header={"jwk": {**PUBLIC, "x": 7}}), UNUSABLE),
        (
            lambda: sign_call("x" * 32, header={"jwk": {"kty": "oct", "k": encode(b"x" * 32)}}),
            UNUSABLE,
        ),
        (lambda: sign_call("x" * 32, header={"jwk": PUBLIC}), UNUSABLE),
        (lambda: "", UNUSABLE),
        (lambda: "a.b.c", UNUSABLE),
        (lambda: ".".join(map(encode, (b"[" * 10_000, b"{}", b"x"))), UNUSABLE),
    ],
)
async def test_other_signatures_are_refused_in_words(prove: Callable[[], str], fault: str) -> None:
    agent = make_agent(ApiServer())
    with pytest.raises(AuthenticationError, match=fault):
        await agent.verify(f"{sign_token()}~{prove()}", AgentMethod.SET_ROLE)


async def test_nothing_that_an_agent_receives_is_accepted_by_another_one() -> None:
    issuer = TokenIssuer()
    caller = AccountIdentity(issuer.requests_of(ACCOUNT))
    agents = {uid: make_agent(issuer, uid) for uid in ("a", "b", "c")}
    received = {uid: await caller.sign(build_audience(uid)) for uid in agents}
    for uid, agent in agents.items():
        await agent.verify(received[uid], AgentMethod.DRAIN)
        for other in received.keys() - {uid}:
            token, proof = split_credential(received[other])
            for relayed in (received[other], token, f"{token}~", f"{token}~{token}", f"~{proof}"):
                with pytest.raises(AuthenticationError):
                    await agent.verify(relayed, AgentMethod.DRAIN)
    assert len(issuer.requests) == 1, "one token for all agents"


async def test_a_worker_cannot_pass_another_ones_token_off_as_its_own() -> None:
    issuer = TokenIssuer()
    gateway, worker = (AccountIdentity(issuer.requests_of(account)) for account in (ACCOUNT, PEER))
    agent = make_agent(issuer)
    stolen, _ = split_credential(await gateway.sign(build_audience("uid-of-the-worker")))
    _, own = split_credential(await worker.sign(build_audience(POD)))
    with pytest.raises(AuthenticationError, match="confirms another key"):
        await agent.verify(f"{stolen}~{own}", AgentMethod.DRAIN)


async def test_a_signature_is_not_taken_twice_after_a_restart() -> None:
    """A process that has listened at the agent's address in between has it."""
    credential = f"{sign_token()}~{sign_call()}"
    await asyncio.sleep(0.01)
    with pytest.raises(AuthenticationError, match="before this agent started"):
        await make_agent(ApiServer()).verify(credential, AgentMethod.WATCH)


async def test_unknown_keys_do_not_flood_the_api_server() -> None:
    server = ApiServer()
    agent = make_agent(server)
    for number in range(100):
        token = sign_token(header={"kid": f"k{number}"})
        with pytest.raises(AuthenticationError):
            await agent.verify(f"{token}~{sign_call()}", AgentMethod.SET_ROLE)
    assert server.requests == 1


async def test_keys_are_read_again_once_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_signatures, "_FIRST_FETCH_S", 0.0)
    server = ApiServer()
    server.is_away = True
    agent = make_agent(server)
    with pytest.raises(AuthenticationError, match="unknown key"):
        await agent.verify(f"{sign_token()}~{sign_call()}", AgentMethod.SET_ROLE)
    server.is_away = False
    await agent.verify(f"{sign_token()}~{sign_call()}", AgentMethod.SET_ROLE)


async def test_a_call_costs_less_than_two_milliseconds() -> None:
    agent, credential = make_agent(ApiServer()), f"{sign_token()}~{sign_call()}"
    await agent.verify(credential, AgentMethod.SET_ROLE)
    started = time.thread_time()
    for _ in range(100):
        await agent.verify(credential, AgentMethod.SET_ROLE)
    assert (time.thread_time() - started) / 100 < 0.002


def sign_as_worker(pod: object) -> str:
    claims = {"kubernetes.io": {"namespace": "team", "pod": pod}}
    return f"{sign_token(sub=PEER, **claims)}~{sign_call()}"


async def test_a_worker_may_ask_for_the_health_of_another_and_nothing_else() -> None:
    agent = make_agent(ApiServer())
    credential = sign_as_worker({"name": "chat-decode-k2"})
    await agent.verify(credential, AgentMethod.HEALTH)
    for method in set(AgentMethod) - {AgentMethod.HEALTH}:
        with pytest.raises(AccessDeniedError, match="may not call"):
            await agent.verify(credential, method)


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
    agent = make_agent(ApiServer())
    if may_drain:
        await agent.verify(sign_as_worker(pod), AgentMethod.DRAIN)
        with pytest.raises(AccessDeniedError):
            await agent.verify(sign_as_worker(pod), AgentMethod.SET_ROLE)
    else:
        with pytest.raises(AccessDeniedError):
            await agent.verify(sign_as_worker(pod), AgentMethod.DRAIN)


async def test_only_pods_of_the_instance_join_its_data_parallel_ranks() -> None:
    agent = make_agent(ApiServer())
    await agent.verify(sign_as_worker({"name": "chat-prefill-x7-1"}), AgentMethod.JOIN_GANG)
    with pytest.raises(AccessDeniedError):
        await agent.verify(sign_as_worker({"name": "chat-prefill-x8-1"}), AgentMethod.JOIN_GANG)
    # A gateway, which may call everything else.
    with pytest.raises(AuthenticationError, match="has no access"):
        await agent.verify(f"{sign_token()}~{sign_call()}", AgentMethod.JOIN_GANG)


def test_the_audience_of_a_key_is_its_thumbprint() -> None:
    """RFC 7638: of the members in the order of their names, without spaces."""
    (padded,) = [build_caller_audience(PUBLIC).removeprefix("cleave.dev/callers/") + "="]
    text = json.dumps({k: PUBLIC[k] for k in ("crv", "kty", "x", "y")}, separators=(",", ":"))
    assert base64.urlsafe_b64decode(padded) == hashlib.sha256(text.encode()).digest()
