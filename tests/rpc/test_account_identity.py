"""One token of the own account for all agents, also while the API server is away."""

import json
import time

import jwt
import pytest

from cleave.rpc import kube_api
from cleave.rpc.account_identity import AccountIdentity, read_pod, request_token, split_credential
from cleave.rpc.credentials import AgentEndpoint, build_audience
from cleave.rpc.kube_api import AccessError, ApiServerAccess, ApiServerError

from tests.support.account_tokens import LIFE_S, TokenIssuer, encode
from tests.support.fake_api_server import FakeApiServer

ACCOUNT = "system:serviceaccount:team:chat-gateways-1"


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def read_claims(text: str) -> dict:
    return jwt.decode(text, options={"verify_signature": False})


async def test_one_token_serves_for_all_agents() -> None:
    issuer = TokenIssuer()
    credentials = issuer.credentials_of(ACCOUNT)
    for number in range(1_024):
        agent = AgentEndpoint(f"10.0.0.{number}:9000", f"p-{number}", f"uid-{number}")
        ((name, text),) = await credentials.build_metadata(agent)
        assert name == "authorization"
        _, proof = split_credential(text.removeprefix("Bearer "))
        assert read_claims(proof)["aud"] == build_audience(f"uid-{number}")
    assert len(issuer.requests) == 1
    assert issuer.requests[0].startswith("cleave.dev/callers/")


async def test_processes_of_an_account_have_keys_of_their_own() -> None:
    issuer = TokenIssuer()
    for _ in range(2):
        await AccountIdentity(issuer.requests_of(ACCOUNT)).sign("a")
    assert len(set(issuer.requests)) == 2


async def test_a_token_is_renewed_before_its_end_and_kept_while_the_api_server_is_away() -> None:
    issuer, clock = TokenIssuer(), Clock()
    caller = AccountIdentity(issuer.requests_of(ACCOUNT), clock)
    first, _ = split_credential(await caller.sign("a"))
    clock.now_s += 0.4 * LIFE_S
    assert split_credential(await caller.sign("a"))[0] == first
    issuer.fault = OSError("away")
    clock.now_s += 0.3 * LIFE_S
    for _ in range(100):
        assert split_credential(await caller.sign("a"))[0] == first, "it is still good"
    assert len(issuer.requests) == 2, "a failed attempt is not repeated at each call"
    issuer.fault = None
    clock.now_s += 11
    assert split_credential(await caller.sign("a"))[0] != first


async def test_without_a_token_nothing_is_shown_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    issuer, clock = TokenIssuer(fault=ApiServerError(403, "may not create tokens")), Clock()
    credentials = issuer.credentials_of(ACCOUNT, clock=clock)
    agent = AgentEndpoint("10.0.0.1:9000", "p", "u")
    assert await credentials.build_metadata(agent) == ()
    assert "cannot get a token of the own service account" in caplog.text
    assert "may not create tokens" in caplog.text
    for _ in range(100):
        await credentials.build_metadata(agent)
    assert len(issuer.requests) == 1
    issuer.fault = None
    clock.now_s += 1.1
    assert await credentials.build_metadata(agent)


async def test_an_expired_token_is_not_shown() -> None:
    issuer, clock = TokenIssuer(), Clock()
    caller = AccountIdentity(issuer.requests_of(ACCOUNT), clock)
    assert await caller.sign("a")
    issuer.fault = OSError("away")
    clock.now_s += LIFE_S + 1
    assert await caller.sign("a") == ""


def build_pod_token(**claims: object) -> str:
    pod = {"name": "chat-gateway-x", "uid": "u1"}
    account = {"name": "chat-gateways-1", "uid": "u2"}
    known = {"namespace": "team", "pod": pod, "serviceaccount": account, **claims}
    payload = json.dumps({"kubernetes.io": known}).encode()
    return f"h.{encode(payload)}.s"


@pytest.fixture
def api_server(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> FakeApiServer:
    """An API server that a pod reaches."""
    access = ApiServerAccess(f"http://127.0.0.1:{server.port}", build_pod_token())
    monkeypatch.setattr(kube_api, "find_access", lambda: access)
    return server


async def test_a_token_is_requested_for_the_own_account_and_ends_with_the_pod(api_server) -> None:
    expiry = "2027-01-02T03:04:05Z"
    api_server.token = {"token": "t", "expirationTimestamp": expiry}
    issued = await request_token("cleave.dev/callers/x")
    assert (issued.text, issued.expires_s) == ("t", 1_798_859_045.0)
    path = "/api/v1/namespaces/team/serviceaccounts/chat-gateways-1/token"
    assert api_server.paths == [path]
    assert api_server.bodies[0]["spec"] == {
        "audiences": ["cleave.dev/callers/x"],
        "expirationSeconds": 3600,
        "boundObjectRef": {
            "apiVersion": "v1", "kind": "Pod", "name": "chat-gateway-x", "uid": "u1",
        },
    }  # fmt: skip


async def test_a_refusal_is_in_the_api_servers_words(api_server) -> None:
    api_server.status = 403
    with pytest.raises(ApiServerError, match="403: not for you"):
        await request_token("cleave.dev/callers/x")


@pytest.mark.parametrize(
    "token",
    [
        "", "x", "a.b.c", "a.!.c", f"h.{encode(b'[]')}.s", f"h.{encode(b'{}')}.s",
        build_pod_token(pod=None), build_pod_token(pod={"name": "x"}),
    ],
)  # fmt: skip
def test_a_token_that_is_not_a_pods_is_an_error_of_one_line(token: str) -> None:
    with pytest.raises(AccessError, match=r"^the token for the API server is not one of a pod$"):
        read_pod(token)
