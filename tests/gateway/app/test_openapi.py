"""The description says what the gateway does: no path more, no path less."""

import json

import pytest
from jsonschema import Draft202012Validator

from cleave.gateway.app.handlers import _METHODS
from cleave.gateway.app.openapi import build_openapi
from cleave.gateway.app.routes import MODEL_PREFIX

DESCRIBED = build_openapi()


def test_every_path_that_is_routed_is_described_and_no_other() -> None:
    routed = {(path.decode(), method.decode().lower()) for path, method in _METHODS.items()}
    described = {(path, method) for path, item in DESCRIBED["paths"].items() for method in item}
    assert described - routed == {(f"{MODEL_PREFIX.decode()}{{model}}", "get")}
    assert routed <= described


def test_references_lead_somewhere_and_names_are_unique() -> None:
    def walk(value: object):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from walk(inner)

    for reference in walk(DESCRIBED):
        found = DESCRIBED
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    names = [item[m]["operationId"] for item in DESCRIBED["paths"].values() for m in item]
    assert len(set(names)) == len(names)


async def test_anybody_can_ask_for_it(make_stage, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-openapi\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    document = (await stage.ask(None, "/openapi.json")).json()
    assert document == json.loads(json.dumps(DESCRIBED))


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (None, "/v1/models", 200),
        (None, "/v1/models/m", 200),
        (None, "/v1/models/none", 404),
        (None, "/health", 200),
        ({"model": "m", "prompt": "a"}, "/v1/completions", 200),
        ({"model": "none", "prompt": "a"}, "/v1/completions", 404),
        (b"{", "/v1/completions", 400),
        ({"model": "m", "input": "a", "previous_response_id": "r"}, "/v1/responses", 400),
        ({"model": "m", "messages": []}, "/v1/messages", 400),
        (b"{", "/v1/messages/count_tokens", 400),
    ],
)
async def test_answers_are_as_described(single, body, path: str, status: int) -> None:
    response = await single.ask(body, path)
    item = DESCRIBED["paths"].get(path) or DESCRIBED["paths"]["/v1/models/{model}"]
    (operation,) = item.values()
    documented = operation["responses"][str(response.status)]
    schema = documented["content"]["application/json"]["schema"]
    assert response.status == status
    Draft202012Validator(schema | {"components": DESCRIBED["components"]}).validate(response.json())
