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
