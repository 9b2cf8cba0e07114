"""Tenants at a real gateway: limits, turns and lateness; nothing to ask where there are none."""

import asyncio
import json

import pytest

from cleave.api.enums import DispatchPolicy, FlippingMode, LateRequestPolicy
from cleave.gateway import server
from cleave.gateway.admission import controller
from cleave.gateway.proxy.token_charge import MIN_TOKEN_S
from cleave.gateway.server import TICK_S

from tests.support.streams import (
    DONE,
    PROMPT_IDS,
    Token,
    build_event,
    build_frame,
    build_role,
    build_stream,
    encode,
    group,
)

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}
SLACK = 20
"""Tokens that a tenant with 60 a minute gets back while a request runs here."""
KEY_START = "a-key-of-16-or-more-"


def write_tenants(tmp_path, *tenants: dict):
    path = tmp_path / "keys.yaml"
    tenants = [each | {"keys": [KEY_START + key for key in each["keys"]]} for each in tenants]
    path.write_text(f"tenants: {json.dumps(tenants)}\n")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY_START}{key}"}


class Gate:
    """A script whose answers wait until it opens; keeps the order in which prompts came."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.order: list[str] = []

    async def __call__(self, engine, request, writer) -> None:
        self.order.append(request.body["prompt"])
        await self.opened.wait()
        await type(engine).answer(engine, request, writer)


async def test_without_tenants_no_key_is_required(single) -> None:
    assert single.context.admission.is_disabled
    await single.ask(ASK)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"requestsPerMinute": 2}, "request_rate_limit"),
        ({"tokensPerMinute": 5}, "token_rate_limit"),
        ({"maxConcurrent": 2}, "concurrency_limit"),
    ],
    ids=str,
)
async def test_above_its_limit_a_tenant_gets_retry_after(make_stage, tmp_path, limit, code) -> None:
    keys = write_tenants(
        tmp_path, {"name": "small", "keys": ["s"], **limit}, {"name": "big", "keys": ["b"]}
    )
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    gate = stage.engines["x"].script = Gate()
    clients = [await stage.connect() for _ in range(2)]
    for client in clients:
        client.send(ASK, **bearer("s"))
    await stage.until(lambda: len(gate.order) == 2, "two are in")
    refused = await stage.ask(ASK, **bearer("s"))
    assert (refused.status, refused.error["code"]) == (429, code)
    assert refused.error["message"].startswith("tenant 'small': more than")
    assert int(refused.headers["retry-after"]) >= 1
    gate.opened.set()
    assert (await stage.ask(ASK, **bearer("b"))).status == 200, "others are not concerned"
    assert [(await client.read()).status for client in clients] == [200, 200]
    metrics = stage.context.metrics
    assert metrics.rejections == {("small", code): 1}
    assert metrics.tenants == {("small", "ok"): 2, ("small", "shed"): 1, ("big", "ok"): 1}
    await stage.until_idle()


async def test_a_request_that_is_cut_off_frees_its_place(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "maxConcurrent": 1})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    gate = stage.engines["x"].script = Gate()
    client = await stage.connect()
    client.send(ASK, **bearer("a"))
    await stage.until(lambda: len(gate.order) == 1, "it is in")
    client.close()
    await stage.until_idle()
    gate.opened.set()
    assert (await stage.ask(ASK, **bearer("a"))).status == 200


def script_stream(events: list[bytes], pause_s: float = 0.0):
    """An engine that streams these events."""

    async def answer(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        for event in events:
            engine.send_chunk(writer, event)
            await writer.drain()
            await asyncio.sleep(pause_s)
        engine.send_chunk(writer, DONE)
        writer.write(b"0\r\n\r\n")

    return answer


def read_charge(stage, name: str) -> float:
    """Tokens that a tenant with 60 a minute has used and not got back."""
    bucket = stage.context.admission._usage_by_tenant[name]._token_bucket
    return bucket._full_at - stage.context.clock()


TOKENS = [Token(number, " word") for number in range(500)]


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [1, 7, 128, 500])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_costs_its_tokens_however_few_events_carry_them(
    make_stage, tmp_path, size: int, chat: bool
) -> None:
    names = [{"name": each, "keys": [each], "tokensPerMinute": 60} for each in "ab"]
    stage = await make_stage({"x": "mixed"}, api_keys=write_tenants(tmp_path, *names))
    # Other tenants' streams carry another number of tokens in each event.
    stage.engines["x"].script = script_stream(build_stream(group(TOKENS, [1] * 500), chat=False))
    assert (await stage.ask(STREAM | {"max_tokens": 500}, **bearer("b"))).status == 200
    other = read_charge(stage, "b")
    stage.engines["x"].script = script_stream(build_stream(group(TOKENS, [size] * 500), chat=chat))
    response = await stage.ask(STREAM | {"max_tokens": 500, "stream_interval": size}, **bearer("a"))
    assert response.status == 200
    assert b'"token_ids"' not in response.body
    charged = read_charge(stage, "a")
    assert charged == pytest.approx(len(TOKENS) + len(PROMPT_IDS), abs=SLACK)
    assert read_charge(stage, "b") <= other


@pytest.mark.interpreted
async def test_a_long_stream_is_charged_while_it_runs(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 600})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    opened = asyncio.Event()

    async def answer(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        for event in build_stream(group(TOKENS, [250, 250]), chat=False):
            engine.send_chunk(writer, event)
        await opened.wait()

    stage.engines["x"].script = answer
    client = await stage.connect()
    client.send(STREAM | {"max_tokens": 900}, **bearer("a"))
    usage = stage.context.admission._usage_by_tenant
    await stage.until(lambda: "a" in usage and read_charge(stage, "a") > 0, "it is admitted")
    await stage.until(lambda: read_charge(stage, "a") * 10 >= 450, "its tokens are charged")
    refused = await stage.ask(ASK | {"prompt": "x" * 800}, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "token_rate_limit")
    client.close()
    opened.set()
    await stage.until_idle()


@pytest.mark.interpreted
async def test_a_prompt_costs_its_tokens_and_not_their_estimate(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 60})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    stage.engines["x"].script = script_stream(build_stream([TOKENS[:5]], chat=False))
    assert (await stage.ask(STREAM | {"prompt": "x" * 40_000}, **bearer("a"))).status == 200
    assert read_charge(stage, "a") <= 8, "10,001 were estimated"


@pytest.mark.interpreted
async def test_several_choices_cost_all_their_tokens(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 60})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)

    def build(index: int, count: int) -> bytes:
        usage = {"prompt_tokens": 10, "total_tokens": 10 + count, "completion_tokens": count}
        choice = {"index": index, "text": "a", "logprobs": None, "finish_reason": None}
        return encode({**build_frame(chat=False), "choices": [choice], "usage": usage})

    events = [build(index, count) for count in (1, 150, 300) for index in range(3)]
    stage.engines["x"].script = script_stream(events)
    response = await stage.ask(STREAM | {"n": 3, "max_tokens": 300}, **bearer("a"))
    assert b"usage" not in response.body
    assert read_charge(stage, "a") == pytest.approx(910, abs=SLACK)
    sent = stage.engines["x"].requests[-1].body
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_an_engine_that_counts_nothing_is_no_free_one(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 100})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    event = encode({"choices": [{"index": 0, "text": "word " * 40}]})
    stage.engines["x"].script = script_stream([event])
    assert (await stage.ask(STREAM | {"max_tokens": 200}, **bearer("a"))).status == 200
    refused = await stage.ask(STREAM | {"prompt": "x" * 100}, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "token_rate_limit")


async def test_a_client_that_reads_slowly_is_charged_by_tokens(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 150})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    assert (await stage.ask(STREAM, **bearer("a"))).status == 200
    part = [Token(number, "x" * 2_048) for number in range(200)]
    stage.engines["x"].script = script_stream([build_event(part)] * 40)
    client = await stage.connect()
    client.writer.transport.pause_reading()
    client.send(STREAM | {"max_tokens": 9_000}, **bearer("a"))
    await stage.until(lambda: any(each.blocked for each in stage.context.clients), "it is full")
    client.close()
    await stage.until_idle()
    stage.engines["x"].script = None
    refused = await stage.ask(STREAM, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "token_rate_limit")


@pytest.mark.parametrize("events", [0, 1], ids=["before it", "after an event"])
@pytest.mark.parametrize(("hidden", "least"), [(True, 50), (False, 0)], ids=["hidden", "shown"])
async def test_who_leaves_while_reasoning_is_hidden_is_charged_by_time(
    make_stage, tmp_path, hidden: bool, least: int, events: int
) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 60})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    sent = [build_role() + build_event(TOKENS[:1], chat=True) * events]
    stage.engines["x"].script = script_stream(sent, pause_s=600)
    client = await stage.connect()
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "m", "stream": True, "messages": messages, "max_tokens": 60}
    client.send(body | {"include_reasoning": not hidden}, "/v1/chat/completions", **bearer("a"))
    await stage.until(lambda: len(stage.engines["x"].requests) == 1, "it is in")
    await asyncio.sleep(60 * MIN_TOKEN_S + 2 * TICK_S)
    client.close()
    await stage.until_idle()
    assert least <= read_charge(stage, "a") <= least + 30


async def test_who_leaves_before_a_whole_answer_is_charged_by_time(make_stage, tmp_path) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "tokensPerMinute": 100})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    gate = stage.engines["x"].script = Gate()
    client = await stage.connect()
    client.send(ASK | {"max_tokens": 90}, **bearer("a"))
    await stage.until(lambda: len(gate.order) == 1, "it is in")
    await asyncio.sleep(90 * MIN_TOKEN_S)
    client.close()
    await stage.until_idle()
    gate.opened.set()
    refused = await stage.ask(ASK | {"prompt": "x" * 100}, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "token_rate_limit")


@pytest.mark.parametrize(
    ("sent", "passed"), [(-7, 0), (0, 0), (3, 3), (None, None), ("-7", 400), (-7.0, 400)]
)
async def test_no_tenant_overtakes_others_in_the_engines(
    make_stage, tmp_path, sent, passed
) -> None:
    keys = write_tenants(
        tmp_path,
        {"name": "a", "keys": ["a"]},
        {"name": "urgent", "keys": ["u"], "minRequestPriority": -7},
        {"name": "later", "keys": ["l"], "minRequestPriority": 5},
    )
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    response = await stage.ask(ASK | {"priority": sent}, **bearer("a"))
    if passed == 400:
        assert (response.status, response.error["param"]) == (400, "priority")
        return
    assert stage.engines["x"].requests[0].body["priority"] == passed
    later = await stage.ask(ASK | {"priority": sent}, **bearer("l"))
    assert later.status == 200
    assert stage.engines["x"].requests[1].body["priority"] == 5
    if type(sent) is int:
        await stage.ask(ASK | {"priority": sent}, **bearer("u"))
        assert stage.engines["x"].requests[2].body["priority"] == sent


async def test_without_tenants_priorities_pass(single) -> None:
    await single.ask(ASK | {"priority": -7})
    assert single.engines["x"].requests[0].body["priority"] == -7


@pytest.mark.interpreted
async def test_tenants_take_turns_once_engines_have_enough_to_do(
    make_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 1.0)
    keys = write_tenants(
        tmp_path,
        {"name": "loud", "keys": ["l"]},
        {"name": "quiet", "keys": ["q"]},
        {"name": "first", "keys": ["f"], "priority": 1},
    )
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    gate = stage.engines["x"].script = Gate()
    clients = []

    async def send(prompt: str, key: str) -> None:
        client = await stage.connect()
        before = stage.context.metrics.in_flight
        client.send(STREAM | {"prompt": prompt}, **bearer(key))
        await stage.until(lambda: stage.context.metrics.in_flight == before + 1, "it has come")
        clients.append(client)

    for number in range(4):
        await send(f"loud{number}", "l")
    await send("quiet", "q")
    await send("first", "f")
    assert gate.order == ["loud0"]
    assert stage.context.admission.count_waiting() == {"m": 5}
    gate.opened.set()
    assert [(await client.read()).status for client in clients] == [200] * 6
    assert gate.order[:2] == ["loud0", "first"]
    assert gate.order.index("quiet") < gate.order.index("loud2")
    await stage.until_idle()


@pytest.mark.interpreted
async def test_a_client_that_leaves_the_queue_is_forgotten(
    make_stage, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 1.0)
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"], "maxQueued": 1})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    gate = stage.engines["x"].script = Gate()
    first, second = await stage.connect(), await stage.connect()
    first.send(ASK, **bearer("a"))
    await stage.until(lambda: len(gate.order) == 1, "one is in")
    second.send(ASK, **bearer("a"))
    await stage.until(lambda: stage.context.admission.count_waiting() == {"m": 1}, "one waits")
    await stage.until(lambda: stage.context.metrics.waiting == 1, "the sweeper has looked")
    page = await stage.ask(path="/metrics", **bearer("a"))
    assert "cleave_gateway_requests_waiting 1.0" in page.body.decode()
    refused = await stage.ask(ASK, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "tenant_queue_full")
    second.close()
    await stage.until(lambda: not stage.context.admission.count_waiting(), "it is gone")
    gate.opened.set()
    assert (await first.read()).status == 200
    await stage.until_idle()


@pytest.mark.parametrize(("above_headroom", "entry"), [(-1_000, "p"), (1_000, "m")])
async def test_no_prompt_is_held_back_that_a_mixed_instance_is_to_take(
    make_stage, tmp_path, above_headroom, entry
) -> None:
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"]})
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    rules = {"flipping": FlippingMode.AUTO, "ttft_slo_ms": 10_000.0}
    stage = await make_stage(roles, api_keys=keys, first_byte_s=5.0, **rules)
    registry = stage.context.router.registry
    (table,) = registry.models["m"].score_tables
    headroom = table.find_headroom(stage.context.router.headroom_ms)
    assert headroom > 2 * controller.BACKLOG_LIMIT_TOKENS
    instance = registry.instances["p"]
    instance.in_flight.prompt.add(headroom + above_headroom)
    registry.refresh(instance)
    assert (await stage.ask(ASK, **bearer("a"))).status == 200
    served = [name for name, engine in stage.engines.items() if engine.requests]
    assert served == (["m"] if entry == "m" else ["p", "d"])
    instance.in_flight.prompt.add(2_000 + controller.BACKLOG_LIMIT_TOKENS)
    registry.refresh(instance)
    client = await stage.connect()
    client.send(ASK, **bearer("a"))
    await stage.until(lambda: stage.context.admission.count_waiting() == {"m": 1}, "that is enough")
    instance.in_flight.prompt.remove(instance.in_flight.prompt.own)
    registry.refresh(instance)
    assert (await client.read()).status == 200


async def test_who_waits_is_let_in_once_others_requests_have_ended(
    make_stage, tmp_path, monkeypatch
) -> None:
    """Those of siblings and other gateways, of which nothing is heard but that they are gone."""
    monkeypatch.setattr(server, "TICK_S", 60.0)
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"]})
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    registry = stage.context.router.registry
    instance = registry.instances["x"]
    instance.in_flight.prompt.add(controller.BACKLOG_LIMIT_TOKENS)
    registry.refresh(instance)
    client = await stage.connect()
    client.send(ASK, **bearer("a"))
    await stage.until(lambda: stage.context.admission.count_waiting() == {"m": 1}, "it waits")
    instance.in_flight.prompt.remove(controller.BACKLOG_LIMIT_TOKENS)
    registry.refresh(instance)
    assert (await client.read()).status == 200
    await stage.until(
        lambda: not stage.context.admission.has_waiters.is_set(), "nobody is looked after"
    )


@pytest.mark.interpreted
async def test_every_wait_has_a_bound(make_stage, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 1.0)
    keys = write_tenants(tmp_path, {"name": "a", "keys": ["a"]})
    stage = await make_stage({"x": "mixed"}, api_keys=keys, first_byte_s=0.4, response_s=20.0)
    gate = stage.engines["x"].script = Gate()
    first = await stage.connect()
    first.send(ASK, **bearer("a"))
    await stage.until(lambda: len(gate.order) == 1, "one is in")
    refused = await stage.ask(ASK, **bearer("a"))
    assert (refused.status, refused.error["code"]) == (429, "waited_too_long")
    gate.opened.set()
    assert (await first.read()).status == 200
    await stage.until_idle()


async def teach(stage, seconds_per_token: float) -> None:
    """As if requests of many lengths had passed."""
    await stage.ask(STREAM)
    model = stage.context.admission._ttft_models["m"]
    for tokens in range(10, 4_000, 10):
        model.observe(tokens, tokens * seconds_per_token)


@pytest.mark.parametrize("late", [LateRequestPolicy.REFUSE, LateRequestPolicy.SERVE])
async def test_a_late_request_is_refused_early_when_configured(make_stage, late) -> None:
    stage = await make_stage({"x": "mixed"}, ttft_slo_ms=500, late_policy=late)
    gate = Gate()
    if late is LateRequestPolicy.REFUSE:
        await teach(stage, 0.001)
    stage.engines["x"].script = gate
    first = await stage.connect()
    first.send(STREAM | {"prompt": "x" * 1_600})
    await stage.until(lambda: len(gate.order) == 1, "400 tokens are before")
    gate.opened.set() if late is LateRequestPolicy.SERVE else None
    response = await stage.ask(STREAM | {"prompt": "y" * 800})
    assert response.status == (429 if late is LateRequestPolicy.REFUSE else 200)
    if late is LateRequestPolicy.REFUSE:
        assert response.error["code"] == "late"
        assert "too late" in response.error["message"]
        gate.opened.set()
    assert (await first.read()).status == 200
    await stage.until_idle()


async def test_a_tenants_own_rule_goes_before_the_gateways(make_stage, tmp_path) -> None:
    keys = write_tenants(
        tmp_path,
        {"name": "eager", "keys": ["e"], "late": "Refuse"},
        {"name": "calm", "keys": ["c"]},
    )
    stage = await make_stage({"x": "mixed"}, ttft_slo_ms=500, api_keys=keys)
    await stage.ask(STREAM, **bearer("c"))
    for tokens in range(10, 4_000, 10):
        stage.context.admission._ttft_models["m"].observe(tokens, tokens * 0.001)
    gate = stage.engines["x"].script = Gate()
    first, second = await stage.connect(), await stage.connect()
    first.send(STREAM | {"prompt": "x" * 1_600}, **bearer("c"))
    await stage.until(lambda: len(gate.order) == 1, "400 tokens are before")
    assert (await stage.ask(STREAM | {"prompt": "y" * 800}, **bearer("e"))).status == 429
    second.send(STREAM | {"prompt": "y" * 800}, **bearer("c"))
    await stage.until(lambda: len(gate.order) == 2, "the calm one is served late")
    gate.opened.set()
    assert [(await client.read()).status for client in (first, second)] == [200, 200]


async def test_attainment_counts_what_was_missed_and_what_was_not_served(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, ttft_slo_ms=600, tpot_slo_ms=150)
    engine = stage.engines["x"]

    def script(first_s: float, gap_s: float):
        async def answer(_, request, writer) -> None:
            await asyncio.sleep(first_s)
            await engine.stream(writer, ["a", "b", "c"], pause_s=gap_s)

        return answer

    async def fail(_, request, writer) -> None:
        engine.send_json(writer, {"error": "boom"}, status=500)

    scripts = [script(0, 0), script(0.9, 0), script(0, 0.45), script(0.9, 0.45), fail]
    for number, each in enumerate(scripts):
        engine.script = each
        assert (await stage.ask(STREAM)).status == (200 if number < 4 else 502)
    missed = {what: count for (_, what), count in stage.context.metrics.slo_results.items()}
    assert missed == {"": 1, "ttft": 1, "tpot": 1, "ttft_and_tpot": 1, "unserved": 1}
    page = (await stage.ask(None, "/metrics")).body
    assert b'cleave_gateway_slo_total{missed="ttft",model="m"} 1.0' in page
    assert b'cleave_gateway_slo_target_seconds{slo="ttft"} 0.6' in page


async def test_a_tenant_cannot_learn_by_caches_what_another_one_has_sent(
    make_fleet, tmp_path
) -> None:
    keys = write_tenants(
        tmp_path,
        {"name": "a", "keys": ["a"]},
        {"name": "b", "keys": ["b"]},
        {"name": "c", "keys": ["c"], "cacheGroup": "g"},
        {"name": "d", "keys": ["d"], "cacheGroup": "g"},
    )
    policy = DispatchPolicy.PREFIX_AWARE
    stage, engines = await make_fleet({"x": "mixed"}, api_keys=keys, policy=policy)
    (instance,) = stage.context.router.registry.instances.values()
    (engine,) = engines.values()

    async def count_hits(key: str, prompt: str) -> tuple[bool, bool]:
        """Whether the gateway expected a part of the prompt in the cache, and the engine had it."""
        before = instance.in_flight.predict_hits()[2], engine.engine.scheduler.prefix_hits
        assert (await stage.ask(ASK | {"prompt": prompt}, **bearer(key))).status == 200
        await stage.until_idle()
        after = instance.in_flight.predict_hits()[2], engine.engine.scheduler.prefix_hits
        return after[0] > before[0], after[1] > before[1]

    secret, shared = "secret words " * 160, "words of a group " * 120
    assert await count_hits("a", secret) == (False, False)
    assert await count_hits("a", secret) == (True, True)
    assert await count_hits("b", secret) == (False, False)
    assert await count_hits("c", shared) == (False, False)
    assert await count_hits("d", shared) == (True, True)
    assert await count_hits("b", shared) == (False, False)
