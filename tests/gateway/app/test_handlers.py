"""What the gateway answers itself, and to whom."""

import time

import pytest

from cleave import distribution
from cleave.gateway.app import handlers

PATIENCE_S = 600
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


async def test_health_is_good_when_a_request_could_be_placed(pair) -> None:
    response = await pair.ask(None, "/health")
    assert (response.status, response.json()["status"]) == (200, "ok")
    names = {i["name"]: i["role"] for i in response.json()["models"]["m"]["instances"]}
    assert names == {"p": "prefill", "d": "decode"}


async def test_health_is_bad_and_says_why_when_none_could(make_stage) -> None:
    stage = await make_stage({})
    response = await stage.ask(None, "/health")
    assert response.status == 503
    assert response.json()["reasons"] == ["no instance has registered yet"]
    engine = await stage.add("d", "decode")
    stage.state(engine, state=1)
    response = await stage.ask(None, "/health")
    assert response.status == 503
    assert "starting" in response.json()["reasons"][0]


async def test_the_first_page_says_what_answers_here_and_needs_no_key(make_stage, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-first-page\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    page = (await stage.ask(None, "/")).json()
    assert page["name"] == "Cleave gateway"
    assert page["version"] == distribution.get_version()
    assert {"/v1/chat/completions", "/v1/models", "/openapi.json"} <= set(page["endpoints"])
    assert "/" not in page["endpoints"]


async def test_an_unknown_path_is_refused_with_where_the_known_ones_are(pair) -> None:
    response = await pair.ask(None, "/v1/modelz")
    assert response.error["code"] == "unknown_url"
    assert "GET / lists" in response.error["message"]


@pytest.mark.parametrize("name", [{}, {"model": None}, {"model": ""}])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_the_only_model_answers_requests_that_name_none(
    make_fleet, path, prompt, name
) -> None:
    fleet, _ = await make_fleet({"p": "prefill", "d": "decode"}, adapters=("an-adapter",))
    response = await fleet.ask(prompt | name, path)
    assert (response.status, response.json().get("model", "m")) == (200, "m")
    fleet.state(await fleet.add("x", "mixed"), model="another")
    response = await fleet.ask(prompt | name, path)
    assert (response.status, response.error["param"]) == (400, "model")


async def test_a_model_is_as_old_as_its_first_instance(make_stage, monkeypatch) -> None:
    stage = await make_stage({})
    began = stage.context.clock() - 3_600
    engine = await stage.add("x", "mixed")
    stage.context.router.registry.known_models["m"] = began
    stage.state(engine)
    (model,) = (await stage.ask(None, "/v1/models")).json()["data"]
    age_s = time.time() - model["created"]
    assert 3_599 < age_s < 3_600 + PATIENCE_S


async def test_models_are_those_of_the_fleet(pair) -> None:
    response = await pair.ask(None, "/v1/models")
    assert [model["id"] for model in response.json()["data"]] == ["m"]


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (None, "/nowhere", 404),
        (None, "/v1/embeddings", 405),
        (ASK, "/v1/audio/speech", 404),
        (ASK, "/v2/completions", 404),
        (None, "/v1/completions", 405),
        (ASK, "/health", 405),
        (ASK, "/metrics", 405),
        (b"{", "/v1/completions", 400),
        (b"", "/v1/chat/completions", 400),
    ],
)
async def test_an_unknown_path_is_an_openai_error(pair, body, path, status) -> None:
    client = await pair.connect()
    response = await client.ask(body, path)
    assert response.status == status
    assert set(response.error) == {"message", "type", "param", "code"}
    assert (await client.ask(None, "/health")).status == 200, "the connection goes on"


@pytest.mark.interpreted
@pytest.mark.parametrize("begin", ["/v1/models/", "/v1/completions/", "/"])
async def test_no_long_path_exists_and_none_is_repeated(pair, begin: str, monkeypatch) -> None:
    monkeypatch.setattr(handlers, "unquote", pytest.fail)
    response = await pair.ask(None, begin + "%" * handlers.MAX_PATH_BYTES)
    assert (response.status, response.error["code"]) == (404, "unknown_url")
    assert len(response.error["message"]) < 400


async def test_the_name_of_an_unknown_model_is_cut_in_the_error(pair) -> None:
    response = await pair.ask(None, "/v1/models/" + "x" * 4_000)
    assert (response.status, response.error["code"]) == (404, "model_not_found")
    assert len(response.error["message"]) < 400


@pytest.mark.interpreted
async def test_a_small_request_that_takes_long_is_read_in_slices(single) -> None:
    """A list of many prompts, or messages with many parts; others are read at once."""
    started = []
    queue = single.context.large_bodies
    start = queue.start
    queue.start = lambda steps: started.append(1) or start(steps)
    part = {"type": "text", "text": "a b " * 100}
    for body, path, slices in (
        (ASK, "/v1/completions", 0),
        (ASK | {"prompt": "a " * 50_000}, "/v1/completions", 0),
        (ASK | {"prompt": ["a"] * 20}, "/v1/completions", 0),
        (ASK | {"prompt": ["a"] * 1_000}, "/v1/completions", 1),
        (ASK | {"prompt": ["a " * 5_000] * 10}, "/v1/completions", 1),
        ({"model": "m", "messages": [{"role": "user", "content": [part]}]}, CHAT, 0),
        ({"model": "m", "messages": [{"role": "user", "content": [part] * 200}]}, CHAT, 1),
    ):
        started.clear()
        assert (await single.ask(body, path)).status == 200
        assert len(started) == slices, path


@pytest.mark.parametrize(
    ("path", "status", "allowed"),
    [
        ("/health", 200, None),
        ("/v1/models/m", 200, None),
        ("/nowhere", 404, None),
        ("/v1/models/none", 404, None),
        ("/v1/completions", 405, "POST"),
    ],
)
async def test_head_is_answered_without_a_body(pair, path: str, status: int, allowed) -> None:
    """A body would be read as the beginning of the next answer."""
    client = await pair.connect()
    client.writer.write(b"HEAD %b HTTP/1.1\r\nHost: g\r\n\r\n" % path.encode())
    got, headers = await client.read_head()
    assert (got, headers.get("allow")) == (status, allowed)
    assert int(headers["content-length"]) > 0
    assert (await client.ask(ASK)).status == 200


async def test_a_wrong_method_error_names_the_allowed_one(pair) -> None:
    assert (await pair.ask(None, "/v1/completions")).headers["allow"] == "POST"
    assert (await pair.ask(ASK, "/v1/models")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("target", ["http://g:80/v1/completions", "HTTPS://g/v1/completions?a=b"])
async def test_targets_may_be_in_absolute_form(pair, target: str) -> None:
    assert (await pair.ask(ASK, target)).status == 200
    assert pair.engines["d"].requests[0].path == "/v1/completions"
    assert (await pair.ask(None, "http://g")).json()["name"] == "Cleave gateway"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions/", "//v1/completions", "/v1/v1/completions", "/completions",
        "/v1//completions//", "http://g/v1/v1/v1/completions/?a=b",
    ],
)  # fmt: skip
async def test_a_base_url_may_end_with_a_slash_or_have_v1_twice_or_not_at_all(pair, path) -> None:
    assert (await pair.ask(ASK, path)).status == 200
    assert pair.engines["d"].requests[0].path == "/v1/completions"
    assert (await pair.ask(None, path)).headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/v1/v1/models", "/models/m"])
async def test_models_are_found_under_the_same_spellings(pair, path: str) -> None:
    page = (await pair.ask(None, path)).json()
    assert "m" in (page.get("id"), page.get("data", [{}])[0].get("id"))


async def test_another_spelling_of_a_path_needs_the_same_key(locked) -> None:
    for path in ("/v1/completions/", "/completions", "//metrics", "/models"):
        body = ASK if "completions" in path else None
        assert (await locked.ask(body, path)).status == 401, path


async def test_a_stream_says_that_it_must_not_be_buffered(pair) -> None:
    answer = await pair.ask(ASK | {"stream": True})
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert "x-accel-buffering" not in (await pair.ask(ASK)).headers


@pytest.fixture
async def locked(make_stage, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# our keys\nsecret-of-a-client-1\n  secret-of-a-client-2  # second\n\n")
    return await make_stage({"x": "mixed"}, api_keys=keys)


@pytest.mark.parametrize("key", ["secret-of-a-client-1", "secret-of-a-client-2"])
async def test_each_key_opens(locked, key: str) -> None:
    assert (await locked.ask(ASK, Authorization=f"Bearer {key}")).status == 200
    assert (await locked.ask(None, "/v1/models", Authorization=f"bearer {key}")).status == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic secret-of-a-client-1"]
)
async def test_anything_else_does_not(locked, value: str) -> None:
    for path, body in (("/v1/completions", ASK), ("/v1/models", None)):
        response = await locked.ask(body, path, Authorization=value)
        assert (response.status, response.error["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert not locked.engines["x"].requests


async def test_a_key_may_come_as_anthropics_clients_send_it(locked) -> None:
    named = {"X-Api-Key": "secret-of-a-client-1"}
    assert (await locked.ask(ASK, **named)).status == 200
    for wrong in ({"X-Api-Key": "other"}, {**named, "Authorization": "Bearer other"}):
        assert (await locked.ask(ASK, **wrong)).status == 401


async def test_a_compressed_body_is_refused_by_its_encoding(pair) -> None:
    client = await pair.connect()
    response = await client.ask(ASK, **{"Content-Encoding": "gzip"})
    assert (response.status, response.error["code"]) == (415, "unsupported_content_encoding")
    assert not any(engine.requests for engine in pair.engines.values())
    again = await pair.connect()
    assert (await again.ask(ASK, **{"Content-Encoding": "identity"})).status == 200


KEY = {"Authorization": "Bearer secret-of-a-client-1"}


async def test_a_probe_needs_no_key_and_gets_no_details(locked) -> None:
    known = await locked.ask(None, "/health", **KEY)
    assert known.json()["models"]["m"]["ready"]
    response = await locked.ask(None, "/health")
    assert (response.status, response.json()) == (200, {"status": "ok"})
    locked.state(locked.engines["x"], state=1, reason="loads")
    response = await locked.ask(None, "/health")
    assert (response.status, response.json()) == (503, {"status": "unavailable"})


async def test_metrics_and_names_are_for_those_with_a_key(locked) -> None:
    response = await locked.ask(None, "/metrics")
    assert (response.status, response.error["code"]) == (401, "invalid_api_key")
    assert b'model="m"' in (await locked.ask(None, "/metrics", **KEY)).body
    for path, options, names in (("/openapi.json", {}, None), ("/openapi.json", KEY, ["m"])):
        answer = (await locked.ask(None, path, **options)).json()
        assert answer["components"]["schemas"]["ModelName"].get("examples") == names


@pytest.mark.parametrize(("tenants", "status"), [(["one"], 200), (["one", "two"], 403)])
async def test_no_tenant_reads_the_metrics_of_another(
    make_stage, internal_port, tmp_path, tenants: list[str], status: int
) -> None:
    keys = tmp_path / "keys"
    lines = [f"- {{name: {name}, keys: [{name}-key-of-a-tenant]}}" for name in tenants]
    keys.write_text("\n".join(["tenants:", *lines]))
    stage = await make_stage({"x": "mixed"}, api_keys=keys, internal_port=internal_port)
    response = await stage.ask(None, "/metrics", Authorization="Bearer one-key-of-a-tenant")
    assert response.status == status
    if status == 403:
        assert response.error["code"] == "internal_only"
        assert "--internal-port" in response.error["message"]
    stage.gateway.port = internal_port
    assert (await stage.ask(None, "/metrics")).status == 200


async def test_metrics_add_up(pair) -> None:
    for body in (ASK, ASK | {"stream": True}, ASK | {"n": 2}, ASK | {"model": "other"}):
        await pair.ask(body)
    lines = (await pair.ask(None, "/metrics")).body.decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    expected = {
        'cleave_gateway_requests_total{model="m",outcome="ok"}': 3,
        'cleave_gateway_requests_total{model="",outcome="refused"}': 1,
        'cleave_gateway_dispatches_total{model="m",reason="disaggregated"}': 2,
        'cleave_gateway_dispatches_total{model="m",reason="single-instance"}': 1,
        'cleave_gateway_handoffs_total{result="used"}': 2,
        "cleave_gateway_requests_in_flight": 0,
        'cleave_gateway_prompt_tokens_total{model="m"}': 21,
        'cleave_gateway_output_tokens_total{model="m"}': 9,
        'cleave_gateway_ttft_seconds_count{model="m",role="prefill"}': 1,
        'cleave_gateway_ttft_seconds_bucket{le="+Inf",model="m",role="prefill"}': 1,
        'cleave_gateway_tpot_seconds_count{model="m",role="decode"}': 1,
    }
    assert {name: float(figures[name]) for name in expected} == expected


async def test_no_prompt_and_no_key_is_logged(locked, caplog) -> None:
    caplog.set_level(0)
    for body in (ASK | {"prompt": "my-prompt"}, b'{"my-prompt":'):
        await locked.ask(body, Authorization="Bearer secret-of-a-client-1")
    await locked.ask(ASK, Authorization="Bearer secret-of-a-client-3")
    assert "my-prompt" not in caplog.text
    assert "secret" not in caplog.text
