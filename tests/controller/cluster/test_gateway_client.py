"""When gateways are polled, how long an answer stays valid, and how reports are merged."""

import time
from typing import Any

import msgspec
import pytest

from cleave.controller.cluster import gateway_client
from cleave.controller.cluster.gateway_client import (
    GatewayClient,
    count_requests,
    fetch_instances,
    merge,
    summarize_kv_paths,
)
from cleave.rpc.fleet_status import (
    MAX_INSTANCES,
    MAX_REPORT_BRACES,
    MAX_REPORTS,
    FleetInstance,
    FleetStatus,
    KvPath,
)

from tests.support.doubles import Answering

READY = frozenset({"a"})
GATEWAYS = ("10.0.0.1",)


class Gateways:
    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.now_s = 0.0
        self.answer = {"a": FleetInstance("a", selectable=True, kv_path=KvPath(verified=True))}

    async def ask(self, urls, _engine_counts):
        self.requests.append(list(urls))
        return self.answer


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


@pytest.fixture
def client(gateways: Gateways) -> GatewayClient[str]:
    return GatewayClient(lambda: gateways.now_s, gateways.ask)


async def test_an_answer_counts_until_other_instances_are_ready(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    assert "a" in await client.get_or_refresh("chat", GATEWAYS, READY, {})
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert len(gateways.requests) == 1
    await client.get_or_refresh("chat", GATEWAYS, READY | {"b"}, {})
    assert len(gateways.requests) == 2


async def test_an_answer_counts_for_a_while_and_a_partial_one_shorter(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert client.get_retry_delay_s("chat") is None
    gateways.now_s = 44
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert len(gateways.requests) == 1
    gateways.now_s, gateways.answer = 46, {"a": FleetInstance("a", selectable=True)}
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert client.get_retry_delay_s("chat") == 1
    gateways.now_s = 48
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert len(gateways.requests) == 3


async def test_gateways_are_polled_soon_until_they_route_to_all_instances(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    gateways.answer = {"a": FleetInstance("a", kv_path=KvPath(verified=True))}
    for pause_s in (1, 2, 4):
        await client.get_or_refresh("chat", GATEWAYS, READY, {})
        assert client.get_retry_delay_s("chat") == pause_s
        gateways.now_s += pause_s
    gateways.answer = {"a": FleetInstance("a", selectable=True, kv_path=KvPath(verified=True))}
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    assert client.get_retry_delay_s("chat") is None


async def test_without_addresses_nothing_is_queried(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    assert await client.get_or_refresh("chat", (), READY, {}) is None
    assert await client.get_or_refresh("chat", GATEWAYS, frozenset(), {}) is None
    assert not gateways.requests


async def test_while_instances_start_gateways_are_polled_for_the_reasons(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    async def look(ready: frozenset[str], has_starting: bool) -> None:
        await client.get_or_refresh("chat", GATEWAYS, ready, {}, has_starting=has_starting)

    await look(frozenset(), True)
    assert len(gateways.requests) == 1, "though none is ready"
    assert client.get_retry_delay_s("chat") == 10
    gateways.now_s = 9
    await look(frozenset(), True)
    assert len(gateways.requests) == 1
    gateways.now_s = 11
    await look(frozenset(), True)
    assert len(gateways.requests) == 2
    await look(READY, False)
    assert client.get_retry_delay_s("chat") is None


async def test_nothing_more_is_expected_of_instances_that_are_scaled_away_as_they_start(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    await client.get_or_refresh("chat", GATEWAYS, frozenset(), {}, has_starting=True)
    gateways.now_s = 11
    await client.get_or_refresh("chat", GATEWAYS, frozenset(), {})
    assert client.get_retry_delay_s("chat") is None


async def test_gateways_that_do_not_answer_have_said_nothing_new(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    before = await client.get_or_refresh("chat", GATEWAYS, READY, {})
    gateways.now_s, gateways.answer = 99, None
    assert await client.get_or_refresh("chat", GATEWAYS, READY, {}) == before


async def test_a_decision_may_want_to_know_what_is_true_now(
    client: GatewayClient[str], gateways: Gateways
) -> None:
    await client.get_or_refresh("chat", GATEWAYS, READY, {})
    gateways.now_s = 10
    await client.get_fresh("chat", ("fd00::1",), {})
    await client.get_fresh("chat", GATEWAYS, {})
    assert gateways.requests[1:] == [["http://[fd00::1]:8081"]]


def page(*instances: FleetInstance) -> bytes:
    return msgspec.json.encode(FleetStatus(instances))


def describe_body(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


async def test_the_reports_of_replicas_are_merged(serve: Answering) -> None:
    one = FleetInstance(
        "d-0", contact="fresh", num_running=3, report_age_s=0.5, requests_in_flight=2
    )
    two = FleetInstance(
        "d-0", contact="fresh", num_running=4, report_age_s=0.1, requests_in_flight=1
    )
    urls = [
        await serve(describe_body(page(one))),
        await serve(describe_body(page(two, FleetInstance("p-0")))),
    ]
    seen = await fetch_instances(urls, {})
    assert all(head.startswith(b"GET /fleet HTTP/1.1\r\n") for head in serve.requests)
    assert list(seen) == ["d-0", "p-0"]
    assert (seen["d-0"].num_running, seen["d-0"].requests_in_flight) == (4, 3)


async def test_gateways_that_say_nothing_useful_are_as_good_as_none(serve: Answering) -> None:
    urls = [
        "http://127.0.0.1:1",
        await serve(stay=True),
        await serve(describe_body(b"{")),
        await serve(describe_body(b'{"instances": [{}]}')),
        await serve(describe_body(b'{"instances": 7}')),
        await serve(describe_body(page(FleetInstance("x")), 503)),
        await serve(describe_body(page(FleetInstance("p-0")))),
    ]
    assert list(await fetch_instances(urls, {}, timeout_s=0.5)) == ["p-0"]
    assert await fetch_instances(urls[:5], {}, timeout_s=0.5) is None
    assert await fetch_instances([], {}) is None


async def test_fields_that_are_new_or_no_longer_sent_do_no_harm(serve: Answering) -> None:
    url = await serve(
        describe_body(b'{"instances": [{"name": "p-0", "colour": "red"}], "more": 1}')
    )
    assert await fetch_instances([url], {}) == {"p-0": FleetInstance("p-0")}


def test_a_gateway_that_has_lost_an_agent_is_believed_last() -> None:
    lost = FleetInstance("d-0", contact="connection lost", state="ready", report_age_s=0.0)
    heard = FleetInstance("d-0", contact="fresh", state="draining", report_age_s=1.0)
    for views in ((lost, heard), (heard, lost)):
        assert merge((FleetStatus((view,)) for view in views), {})["d-0"].state == "draining"


def test_requests_just_sent_by_a_gateway_count_before_the_engine_reports_them() -> None:
    assert count_requests(FleetInstance("d", num_running=2, num_waiting=3)) == 5
    assert count_requests(FleetInstance("d", num_running=1, requests_in_flight=4)) == 4
    assert count_requests(FleetInstance("d")) == 0


MOVED = "p -> d: 24.00 MB for 2,560 tokens in"
FAST = KvPath(True, "nixl over rdma", 8.0, 24e9, f"{MOVED} 0.001 s, 24 GB/s")
SLOW = KvPath(True, "nixl over tcp", 40.0, 1.234e9, f"{MOVED} 0.0194 s, 1.23 GB/s")
WITHOUT_RATE = KvPath(True, "nixl", 8.4, detail=f"{MOVED} 0 s")


@pytest.mark.parametrize(
    ("paths", "verified", "message"),
    [
        ([], 0, "no gateway knows an instance yet"),
        ([FAST], 1, f"nixl over rdma, {MOVED} 0.001 s, 24 GB/s"),
        (
            [FAST, SLOW, WITHOUT_RATE],
            3,
            f"nixl over tcp, {MOVED} 0.0194 s, 1.23 GB/s (the slowest of 3)",
        ),
        ([WITHOUT_RATE], 1, f"nixl, {MOVED} 0 s"),
        (
            [FAST, KvPath(detail="KV test with p-0 failed: other tokens"), KvPath()],
            1,
            "2 of 3 instances are not verified: i1: KV test with p-0 failed: other tokens",
        ),
    ],
)
def test_the_kv_paths_become_one_sentence(paths: list[KvPath], verified: int, message: str) -> None:
    summary = summarize_kv_paths(
        FleetInstance(f"i{n}", kv_path=path) for n, path in enumerate(paths)
    )
    assert (summary.verified, summary.total, summary.message) == (verified, len(paths), message)


def test_an_instance_that_has_not_been_tested_yet_says_what_it_does() -> None:
    summary = summarize_kv_paths([FleetInstance("p-0", state="starting", reason="engine starts")])
    assert summary.message == "1 of 1 instances are not verified: p-0: engine starts"


def test_a_gateway_that_has_not_connected_yet_stops_no_instance_from_serving() -> None:
    sends = FleetInstance("d-0", contact="fresh", selectable=True, report_age_s=0.1)
    waits = FleetInstance("d-0", contact="silent", report_age_s=0.0)
    assert merge((FleetStatus((view,)) for view in (waits, sends)), {})["d-0"].selectable


async def test_a_gateway_that_knows_no_instance_has_answered(serve: Answering) -> None:
    assert await fetch_instances([await serve(describe_body(page()))], {}) == {}


def member(name: str, **fields: Any) -> FleetInstance:
    seen = {"role": "decode", "home": "decode", "selectable": True, "kv_path": FAST, **fields}
    return FleetInstance(name, **seen)


def test_a_cell_in_one_pod_is_one_instance() -> None:
    slow = KvPath(True, "nixl", 1.0, 1e9, "slow")
    page = FleetStatus(
        (
            member("c.prefill-0", role="prefill", kv_path=slow, num_running=2),
            member("c.decode-0", requests_in_flight=3, num_waiting=1),
            member("other"),
        )
    )
    merged = merge([page], {"c": 2})
    assert merged.keys() == {"c", "other"}
    cell = merged["c"]
    assert (cell.role, cell.home, cell.selectable) == ("mixed", "", True)
    assert (cell.num_running, cell.num_waiting, cell.requests_in_flight) == (2, 1, 3)
    assert cell.kv_path == slow
    assert merged["other"] == member("other")


def test_a_pod_whose_engines_have_different_weights_is_known_as_such() -> None:
    page = FleetStatus(
        (
            member("c.prefill-0", weights="b2", weights_read_s=9.0),
            member("c.decode-0", weights="a1", weights_read_s=3.0, weights_fault="a fault"),
        )
    )
    merged = merge([page], {"c": 2})["c"]
    assert (merged.weights, merged.weights_read_s) == ("a1.b2", 9.0)
    assert merged.weights_fault == "a fault"


def test_data_parallel_ranks_are_one_instance_of_their_role() -> None:
    page = FleetStatus((member("d.rank-0", num_running=1), member("d.rank-1", num_running=2)))
    (merged,) = merge([page], {"d": 2}).values()
    assert (merged.name, merged.role, merged.num_running) == ("d", "decode", 3)
    assert merged.selectable
    assert not merge([page], {"d": 3})["d"].selectable


@pytest.mark.parametrize("fault", [{"selectable": False}, {"kv_path": KvPath(detail="untested")}])
def test_a_cell_takes_requests_only_when_all_its_members_do(fault: dict[str, Any]) -> None:
    page = FleetStatus((member("c.decode-0"), member("c.prefill-0", role="prefill", **fault)))
    assert not merge([page], {"c": 2})["c"].selectable


def test_a_cell_of_which_a_gateway_knows_some_members_takes_no_requests() -> None:
    page = FleetStatus((member("c.decode-0"), member("c.prefill-0", role="prefill")))
    assert not merge([page], {"c": 3})["c"].selectable


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": [' + b",".join([b'{"name": "a"}'] * 4_097) + b"]}",
        b'{"instances": [' + b",".join([b"{}"] * 300_000) + b"]}",
        b"[]",
    ],
    ids=["too many", "far too many", "no page"],
)
def test_a_page_that_no_gateway_writes_is_ignored(body: bytes) -> None:
    started = time.thread_time()
    assert gateway_client.decode_page(body) is None
    assert time.thread_time() - started < 0.5


def test_the_largest_page_of_a_gateway_is_read() -> None:
    report = "{" * MAX_REPORT_BRACES
    instances = tuple(
        FleetInstance(
            f"i{number}",
            model_report=report if number < MAX_REPORTS else "",
            weights="a" * 12,
            weights_fault="x" * 120,
        )
        for number in range(MAX_INSTANCES)
    )
    page = FleetStatus(instances)
    assert gateway_client.decode_page(msgspec.json.encode(page)) == page
