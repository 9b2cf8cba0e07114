"""What the operator reads of the fleet, and that other clients cannot."""

import asyncio

import msgspec
import pytest

from cleave.controller.cluster import gateway_client
from cleave.gateway.app import fleet_status
from cleave.rpc.fleet_status import FleetInstance, FleetStatus, KvPairs, KvPath
from cleave.rpc.v1 import agent_pb2


@pytest.fixture
async def stage(make_stage, internal_port):
    """A gateway with keys, queried at its internal port."""
    stage = await make_stage({"p": "prefill", "d": "decode"}, internal_port=internal_port)
    stage.gateway.port = internal_port
    return stage


async def read_page(stage) -> FleetStatus:
    response = await stage.ask(None, "/fleet")
    assert response.status == 200
    return msgspec.json.decode(response.body, type=FleetStatus)


async def test_every_instance_is_listed_with_its_load_and_kv_path(stage) -> None:
    kv_path = agent_pb2.KvPath(
        verified=True, transport="nixl over tcp", transfer_ms=3.5, bytes_per_s=1.2e9, pull_ms=2.5
    )
    stage.state(stage.engines["d"], epoch=4, kv_path=kv_path, restarts=2, home=agent_pb2.ROLE_MIXED)
    report = agent_pb2.LoadReport(
        boot_id="boot-d", num_running=3, num_waiting=1, kv_cache_usage=0.25
    )
    registry = stage.context.router.registry
    registry.on_event("d", agent_pb2.WatchEvent(load=report), stage.context.clock() - 1.5)
    pick = stage.context.router.pick("m", 100, 20)
    page = await read_page(stage)
    assert [instance.name for instance in page.instances] == ["d", "p"]
    first_instance = page.instances[0]
    assert 1.5 <= first_instance.report_age_s < 60
    assert msgspec.structs.replace(first_instance, report_age_s=0.0) == FleetInstance(
        name="d",
        deployment="d",
        model="m",
        revision="r1",
        role="decode",
        home="mixed",
        state="ready",
        epoch=4,
        contact="fresh",
        selectable=True,
        restarts=2,
        num_running=3,
        num_waiting=1,
        pending_tokens=120,
        kv_cache_usage=0.25,
        requests_in_flight=1,
        kv_path=KvPath(True, "nixl over tcp", 3.5, 1.2e9, pull_ms=2.5),
        kv_pairs=KvPairs(total=1),
    )
    stage.context.router.release(pick)


async def test_every_instance_says_what_it_has_loaded_and_when(stage) -> None:
    stage.state(stage.engines["d"], weights="a1", weights_read_ms=1_500, weights_fault="x" * 900)
    described = (await read_page(stage)).instances[0]
    assert (described.weights, described.weights_read_s) == ("a1", 1.5)
    assert described.weights_fault == "x" * 120


async def test_adapters_are_summed_up_in_a_digest_and_the_first_fault(stage) -> None:
    adapters = [
        agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", loaded=True),
        agent_pb2.RuntimeAdapter(name="law", engine_name="law@1"),
        agent_pb2.RuntimeAdapter(name="tax", engine_name="tax@1", fault="no file " * 100),
    ]
    stage.state(stage.engines["d"], runtime_adapters=adapters, adapters_digest="abc")
    described = (await read_page(stage)).instances[0]
    assert (described.adapters_digest, described.adapters_pending) == ("abc", 2)
    assert described.adapter_fault.startswith("tax: no file")
    assert len(described.adapter_fault) <= 300


async def test_a_source_that_nothing_can_load_does_not_fill_the_page(stage, monkeypatch) -> None:
    monkeypatch.setattr(fleet_status, "_MAX_ADAPTER_FAULTS", 1)
    for engine in stage.engines.values():
        adapter = agent_pb2.RuntimeAdapter(name="sql", engine_name="sql@1", fault="no file")
        stage.state(engine, runtime_adapters=[adapter], adapters_digest="abc")
    first, second = (await read_page(stage)).instances
    assert (first.adapter_fault, second.adapter_fault) == ("sql: no file", "")
    assert (first.adapters_pending, second.adapters_pending) == (1, 1)


async def test_pairs_are_summed_up_by_decode_instance(stage) -> None:
    await stage.add("q", "prefill")
    await stage.add("r", "prefill")
    registry, now = stage.context.router.registry, stage.context.clock()
    proofs = agent_pb2.PairProofs(boot_id="boot-d")
    for name, trust, age_s, rate in (
        ("p", agent_pb2.TRUST_PROVEN, 40, 2e9),
        ("q", agent_pb2.TRUST_PROVEN, 10, 1.9e9),
        ("r", agent_pb2.TRUST_FAILED, 5, 1.0),
    ):
        proofs.proofs.add(
            prefill=name,
            prefill_boot_id=f"boot-{name}",
            trust=trust,
            age_ms=1000 * age_s,
            bytes_per_s=rate,
            pull_ms=3.0,
            reason="" if trust == agent_pb2.TRUST_PROVEN else f"{name} -> d: no byte",
        )
    registry.on_event("d", agent_pb2.WatchEvent(pairs=proofs), now)
    page = {each.name: each for each in (await read_page(stage)).instances}
    pairs = page["d"].kv_pairs
    assert 40 <= pairs.oldest_s < 100
    assert msgspec.structs.replace(pairs, oldest_s=0.0) == KvPairs(
        3, 2, ("r",), 1, bytes_per_s=1.9e9, pull_ms=3.0, reason="r -> d: no byte"
    )
    assert page["p"].kv_pairs == KvPairs()
    registry.update_connectivity(stage.context.clock())
    metrics = (await stage.ask(None, "/metrics")).body.decode()
    assert 'cleave_gateway_kv_pairs{model="m",state="proven"} 2.0' in metrics
    assert 'cleave_gateway_kv_pairs{model="m",state="closed"} 1.0' in metrics
    assert 'cleave_gateway_kv_pairs{model="m",state="unproven"} 0.0' in metrics
    assert 'cleave_gateway_kv_pair_bytes_per_second_min{model="m"} 1.9e+09' in metrics
    (age,) = [
        float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith('cleave_gateway_kv_proof_age_seconds_max{model="m"}')
    ]
    assert 39 < age < 100


async def test_the_reason_an_instance_is_not_ready_is_bounded(stage) -> None:
    starting = agent_pb2.STATE_STARTING
    stage.state(stage.engines["p"], state=starting, reason="engine lost: " + "x" * 9_000)
    instance = (await read_page(stage)).instances[1]
    assert (instance.state, instance.selectable) == ("starting", False)
    assert instance.reason.startswith("engine lost: xxx")
    assert len(instance.reason) <= 300


async def test_a_page_holds_so_many_instances_and_counts_the_rest(stage, monkeypatch) -> None:
    monkeypatch.setattr(fleet_status, "MAX_INSTANCES", 1)
    page = await read_page(stage)
    assert ([instance.name for instance in page.instances], page.left_out) == (["d"], 1)


async def test_a_gateway_says_that_it_ends(stage) -> None:
    assert not (await read_page(stage)).draining
    stage.context.draining = True
    assert (await read_page(stage)).draining


async def test_clients_do_not_see_the_fleet(pair) -> None:
    assert (await pair.ask(None, "/fleet")).status == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/"])
async def test_the_internal_port_serves_no_models(stage, path: str) -> None:
    assert (await stage.ask(None, path)).status == 404


@pytest.mark.parametrize("path", ["/fleet", "/health", "/metrics"])
async def test_the_internal_port_asks_for_no_key(make_stage, internal_port, tmp_path, path) -> None:
    (tmp_path / "keys").write_text("secret-of-the-fleet")
    stage = await make_stage(
        {"x": "mixed"}, internal_port=internal_port, api_keys=tmp_path / "keys"
    )
    assert (await stage.ask(None, "/v1/models")).status == 401
    stage.gateway.port = internal_port
    response = await stage.ask(None, path)
    assert response.status == 200
    assert b'"m"' in response.body


async def test_both_ports_close_at_the_end(stage, internal_port) -> None:
    await stage.gateway.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", internal_port)


async def test_the_first_ready_instance_of_each_revision_reports_its_model(stage) -> None:
    for name, revision in (("q", "r1"), ("s", "r2"), ("t", "r2")):
        await stage.add(name, "prefill")
        state = agent_pb2.STATE_STARTING if name == "s" else agent_pb2.STATE_READY
        engine = stage.engines[name]
        stage.state(engine, revision=revision, state=state, model_report=f"of {name}")
    stage.state(stage.engines["d"], model_report="x" * 100_000)
    page = await read_page(stage)
    reports = {each.name: each.model_report for each in page.instances}
    assert reports == {"d": "", "p": "", "q": "of q", "s": "", "t": "of t"}


async def test_a_report_full_of_braces_does_not_hide_the_fleet(stage) -> None:
    await stage.add("q", "prefill")
    stage.state(stage.engines["q"], model_report="{" * 16_384)
    response = await stage.ask(None, "/fleet")
    page = gateway_client.decode_page(response.body)
    assert page is not None
    assert [(each.name, each.model_report) for each in page.instances] == [
        ("d", ""),
        ("p", ""),
        ("q", ""),
    ]


async def test_reports_about_models_are_few(stage) -> None:
    for number in range(12):
        await stage.add(f"e{number:02}", "prefill")
        engine = stage.engines[f"e{number:02}"]
        stage.state(engine, revision=f"r{number}", model_report="x" * 16_000)
    page = await read_page(stage)
    assert sum(bool(each.model_report) for each in page.instances) == 8


async def test_an_instance_that_reports_another_config_has_its_report_too(stage) -> None:
    reports = {"q": '{"configDigest":"a","tensor":1}', "r": '{"configDigest":"a","tensor":2}'}
    reports |= {"s": '{"configDigest":"b"}', "t": '{"configDigest":"b"}', "u": "[" * 9_000}
    for name, report in reports.items():
        await stage.add(name, "prefill")
        stage.state(stage.engines[name], revision="r1", model_report=report)
    page = await read_page(stage)
    digests = {each.name: each.model_digest for each in page.instances if each.model_digest}
    assert digests == {"q": "a", "r": "a", "s": "b", "t": "b"}
    assert [each.name for each in page.instances if each.model_report] == ["q", "s", "u"]


async def test_every_revision_has_a_report_before_any_has_two(stage) -> None:
    for number in range(12):
        await stage.add(f"e{number:02}", "prefill")
        engine, revision = stage.engines[f"e{number:02}"], "r1" if number < 10 else f"r{number}"
        stage.state(engine, revision=revision, model_report=f'{{"configDigest":"{number}"}}')
    page = await read_page(stage)
    reporters = [each.name for each in page.instances if each.model_report]
    assert reporters == ["e00", "e01", "e02", "e03", "e04", "e05", "e10", "e11"]
