"""What of a request reaches the dispatch policy."""

from collections import Counter

from cleave.api.enums import DispatchPolicy

FLEET = {"p1": "prefill", "p2": "prefill", "d": "decode"}


async def prefills(stage, bodies: list[dict], **headers: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for body in bodies:
        response = await stage.ask({"model": "m", **body}, **headers)
        assert response.status == 200
        found[response.headers["x-cleave-prefill"]] += 1
        await stage.until_idle()
    return found


async def test_a_session_keeps_its_prefill_instance(make_stage) -> None:
    stage = await make_stage(FLEET, session_header="X-Session")
    bodies = [{"prompt": "hello"}] * 4
    assert await prefills(stage, bodies) == {"p1": 2, "p2": 2}
    for name in ("one", "two", "three"):
        assert len(await prefills(stage, bodies, **{"x-session": name})) == 1


async def test_headers_of_other_names_are_no_sessions(make_stage) -> None:
    stage = await make_stage(FLEET, session_header="X-Session")
    same_session = await prefills(stage, [{"prompt": "hello"}] * 4, **{"x-sessioN-id": "one"})
    assert same_session == {"p1": 2, "p2": 2}


async def test_a_conversation_goes_back_to_where_its_beginning_was_computed(make_stage) -> None:
    stage = await make_stage(FLEET, policy=DispatchPolicy.PREFIX_AWARE)
    for start in ("a", "b", "c"):
        turns = [{"prompt": start * 2_000 + "next" * n} for n in range(4)]
        assert len(await prefills(stage, turns)) == 1


async def test_by_default_turns_go_where_the_earlier_ones_were_computed(make_stage) -> None:
    stage = await make_stage(FLEET)
    turns = [{"prompt": "a" * 4_000 + "next" * n} for n in range(4)]
    assert sorted((await prefills(stage, turns)).values()) == [4]


async def test_shortest_wait_does_not_look_at_prompts(make_stage) -> None:
    stage = await make_stage(FLEET, policy=DispatchPolicy.SHORTEST_WAIT)
    turns = [{"prompt": "a" * 4_000 + "next" * n} for n in range(4)]
    assert await prefills(stage, turns) == {"p1": 2, "p2": 2}


async def test_tenants_do_not_see_each_others_cached_prompts(make_stage, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "tenants:\n- {name: one, keys: [key-of-tenant-one]}\n"
        "- {name: two, keys: [key-of-tenant-two]}\n"
    )
    stage = await make_stage(FLEET, api_keys=keys, policy=DispatchPolicy.PREFIX_AWARE)
    router, computed = stage.context.router, []
    for name in ("one", "one", "two", "two"):
        before = sum(each.in_flight.cached_tokens for each in router.registry.instances.values())
        body = [{"prompt": "a" * 4_095}]
        await prefills(stage, body, authorization=f"Bearer key-of-tenant-{name}")
        after = sum(each.in_flight.cached_tokens for each in router.registry.instances.values())
        computed.append(after > before)
    assert computed == [False, True, False, True]


async def test_answers_teach_the_router_how_long_answers_are(make_stage) -> None:
    stage = await make_stage({"x": "mixed"})
    before = stage.context.router.length_predictor.predict(2)
    for _ in range(20):
        await stage.ask({"model": "m", "prompt": "hello", "stream": True})
    assert stage.context.router.length_predictor.predict(2) < before / 2
