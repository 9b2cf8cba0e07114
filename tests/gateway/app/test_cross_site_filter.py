"""Which requests reach a gateway of one machine: those of its own clients and pages."""

import pytest

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
JSON = "application/json"
HERE = "127.0.0.1:8080"


@pytest.fixture
async def stage(make_stage, internal_port: int):
    return await make_stage(
        {"x": "mixed"}, allowed_hosts=("llm.example",), internal_port=internal_port
    )


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "127.0.0.1",
        "localhost",
        "LocalHost:8080",
        "[::1]:8080",
        "127.8.9.1",
        "llm.example",
        "LLM.example:80",
    ],
)
async def test_its_own_names_are_served(stage, host: str) -> None:
    response = await stage.ask(ASK, Host=host, Content_Type=JSON)
    assert response.status == 200
    assert (await stage.ask(None, "/v1/models", Host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.localhost",
        ),
        *(
            "",
            ":8080",
            "localhost:8080:1",
            "localhost:",
            "[::1",
            "::1",
            "127.1",
            "0x7f000001",
            "2130706433",
            "0.0.0.0",
        ),
        *(
            "10.0.0.1",
            "[fd00::1]",
            "llm.example.",
            "xllm.example",
            "localhost@evil.example",
            "local host",
            "locälhost",
        ),
        *("a, localhost", "localhost/", "127.0.0.1#", "*"),
    ],
)
async def test_a_name_that_was_made_to_point_here_is_refused(
    stage, host: str, internal_port
) -> None:
    for body, path in (
        (ASK, "/v1/completions"),
        (None, "/v1/models"),
        (None, "/health"),
        (None, "/nowhere"),
    ):
        response = await stage.ask(body, path, Host=host, Content_Type=JSON)
        assert (response.status, response.error["code"]) == (421, "host_not_allowed")
        assert "localhost" in response.error["message"]
    stage.gateway.port = internal_port
    for path in ("/fleet", "/metrics", "/health"):
        assert (await stage.ask(None, path, Host=host)).status == 421
    assert not stage.engines["x"].requests


async def test_no_name_is_refused(stage) -> None:
    client = await stage.connect()
    client.writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert (await client.read()).status == 421


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonp",
        "",
    ],
)
async def test_a_body_that_browsers_send_without_asking_is_refused(stage, kind: str | None) -> None:
    fields = {} if kind is None else {"Content_Type": kind}
    for path in ("/v1/completions", "/v1/messages", "/tokenize"):
        response = await stage.ask(ASK, path, Host=HERE, **fields)
        assert response.status == 415
        assert "application/json" in response.json()["error"]["message"]
    assert (await stage.ask(ASK, "/health", Host=HERE, **fields)).status == 405
    assert (await stage.ask(ASK, "/nowhere", Host=HERE, **fields)).status == 404
    assert not stage.engines["x"].requests


@pytest.mark.parametrize("kind", [JSON, "application/json; charset=utf-8", "Application/JSON"])
async def test_json_is_served(stage, kind: str) -> None:
    assert (await stage.ask(ASK, Host=HERE, Content_Type=kind)).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "file://"},
        {"origin": "http://127.0.0.1:8080.evil.example"},
        {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
        {"origin": "", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
    ],
)
async def test_a_page_of_another_site_is_refused(stage, fields: dict[str, str]) -> None:
    for body, path in ((ASK, "/v1/completions"), (None, "/v1/models"), (None, "/health")):
        response = await stage.ask(body, path, Host=HERE, Content_Type=JSON, **fields)
        assert (response.status, response.error["code"]) == (403, "origin_not_allowed")
    assert not stage.engines["x"].requests


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"origin": f"http://{HERE}", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none", "sec_fetch_mode": "navigate"},
        {"sec_fetch_site": "same-origin"},
    ],
)
async def test_its_own_page_and_other_clients_are_served(stage, fields: dict[str, str]) -> None:
    for body, path in ((ASK, "/v1/completions"), (None, "/v1/models")):
        assert (await stage.ask(body, path, Host=HERE, Content_Type=JSON, **fields)).status == 200


async def test_a_link_of_another_page_may_be_followed_but_sends_nothing(stage) -> None:
    fields = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "Host": HERE}
    assert (await stage.ask(None, "/v1/models", **fields)).status == 200
    assert (await stage.ask(ASK, Content_Type=JSON, **fields)).status == 403


async def test_pages_that_cors_allows_are_served(make_stage) -> None:
    allowed = ("https://chat.example",)
    stage = await make_stage({"x": "mixed"}, allowed_hosts=("localhost",), allowed_origins=allowed)
    fields = {"Host": "localhost:8080", "Content_Type": JSON, "Sec_Fetch_Site": "cross-site"}
    response = await stage.ask(ASK, Origin=allowed[0], **fields)
    assert (response.status, response.headers["access-control-allow-origin"]) == (200, allowed[0])
    assert (await stage.ask(ASK, Origin="https://evil.example", **fields)).status == 403
    assert (await stage.ask(ASK, **fields)).status == 403


async def test_a_page_is_refused_before_its_body_has_come(stage) -> None:
    client = await stage.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000000\r\n\r\n"
    client.writer.write(head)
    assert (await client.read()).status == 421


async def test_without_the_option_any_name_and_type_is_served(single) -> None:
    response = await single.ask(
        ASK, Host="chat.example", Content_Type="text/plain", Origin="https://a.example"
    )
    assert response.status == 200
