"""LoRA adapters of the emulated engine: what each answers, and that its KV is its own."""

import pytest

from cleave_worker.emulator.config import EmulatorConfigError, parse_adapters

ADAPTERS = ("sql", "law")
ASK = {"prompt": [11, 12, 13, 14] * 30, "max_tokens": 20, "ignore_eos": True}


async def test_adapters_are_listed_below_their_model_as_vllm_does(serve) -> None:
    server = await serve(adapters=ADAPTERS)
    async with server.session.get(server.url + "/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("m", None),
        ("sql", "m"),
        ("law", "m"),
    ]


async def test_each_adapter_answers_in_its_own_way_and_under_its_name(serve) -> None:
    server = await serve(adapters=ADAPTERS)
    texts = {}
    for model in ("m", *ADAPTERS, "m", *ADAPTERS):
        status, answer = await server.post(ASK | {"model": model})
        assert (status, answer["model"]) == (200, model)
        text = answer["choices"][0]["text"]
        assert texts.setdefault(model, text) == text, "cached or not"
    assert len(set(texts.values())) == 3


async def test_a_prefix_cached_for_one_adapter_is_no_others(serve) -> None:
    server = await serve(adapters=ADAPTERS)
    hit = 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'
    for model, cached in (("m", 0), ("sql", 0), ("sql", 112), ("law", 112)):
        await server.text(ASK | {"model": model})
        assert (await server.samples())[hit] == cached, model


async def test_kv_handed_over_goes_on_as_the_adapter_alone_would(serve) -> None:
    one, other = await serve("A", adapters=ADAPTERS), await serve("B", adapters=ADAPTERS)
    ask = ASK | {"model": "sql"}
    params = await one.prefill(ask)
    assert await other.text({**ask, "kv_transfer_params": params}) == await one.text(ask)


@pytest.mark.parametrize(("first", "second"), [("m", "sql"), ("sql", "law")])
async def test_kv_of_another_adapter_is_refused(serve, first: str, second: str) -> None:
    one, other = await serve("A", adapters=ADAPTERS), await serve("B", adapters=ADAPTERS)
    params = await one.prefill(ASK | {"model": first})
    status, answer = await other.post({**ASK, "model": second, "kv_transfer_params": params})
    assert (status, "of another prompt" in answer["error"]["message"]) == (500, True)


def test_adapters_are_named_in_either_of_vllms_forms() -> None:
    assert parse_adapters(["sql=/a", '{"name": "law", "path": "/b"}'], enabled=True) == ADAPTERS
    assert parse_adapters((), enabled=False) == ()


@pytest.mark.parametrize(
    ("modules", "enabled", "message"),
    [
        (["sql=/a"], False, "--enable-lora"),
        (["=/a"], True, "name"),
        (["{"], True, "malformed"),
        (['{"path": "/a"}'], True, "malformed"),
        (["sql=/a", "sql=/b"], True, "unique name"),
    ],
)
def test_adapters_that_vllm_would_refuse_are_refused(modules, enabled, message) -> None:
    with pytest.raises(EmulatorConfigError, match=message):
        parse_adapters(modules, enabled)


async def test_adapters_are_loaded_and_unloaded_at_run_time(serve, tmp_path) -> None:
    server = await serve(loads_adapters=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    load = {"lora_name": "new", "lora_path": str(tmp_path)}
    assert (await server.post(ASK | {"model": "new"}))[0] == 404
    for status in (200, 400):
        async with server.session.post(f"{server.url}/v1/load_lora_adapter", json=load) as response:
            assert response.status == status, "a second time it is there already"
    assert await server.text(ASK | {"model": "new"}) != await server.text(ASK)
    for status in (200, 404):
        path = f"{server.url}/v1/unload_lora_adapter"
        async with server.session.post(path, json={"lora_name": "new"}) as response:
            assert response.status == status
    assert (await server.post(ASK | {"model": "new"}))[0] == 404


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "new", "lora_path": "/no/such/folder"}, 404, "No adapter found for"),
        ({"lora_path": "/a"}, 400, "lora_name"),
        ({"lora_name": "m", "lora_path": "/a"}, 400, "already"),
    ],
)
async def test_adapters_that_vllm_would_not_load_are_not(serve, body, status, message) -> None:
    server = await serve(loads_adapters=True)
    found, answer = await server.post(body, "/v1/load_lora_adapter")
    assert (found, message in answer["error"]["message"]) == (status, True)


async def test_without_vllms_variable_there_are_no_such_paths(serve) -> None:
    server = await serve(adapters=ADAPTERS)
    path = f"{server.url}/v1/load_lora_adapter"
    async with server.session.post(path, json={"lora_name": "a"}) as response:
        assert response.status == 404
