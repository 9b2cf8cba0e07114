"""The operator's command line, its pages and its handlers."""

from pathlib import Path

import aiohttp
import kopf
import pytest
from prometheus_client import CollectorRegistry

from cleave.controller import handlers, main
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.controller import Controller
from cleave.controller.manager import ManagerOptions, OperatorEndpoints, WebhookOptions
from cleave.controller.metrics import OperatorCollector, OperatorMetrics
from cleave.controller.resync import WATCHED_KINDS
from cleave.controller.settings import OperatorSettings
from cleave.manifests.container import Images

from tests.support.fake_cluster import chat


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ManagerOptions]:
    """Options of operators that would have run."""
    found: list[ManagerOptions] = []
    monkeypatch.setattr(main, "run", lambda options: found.append(options) or 0)
    monkeypatch.setattr(main, "_set_up_logging", lambda *_, **__: None)
    return found


def test_the_command_line_says_it_all(ran: list[ManagerOptions]) -> None:
    line = "--identity me --own-namespace here --namespace a --namespace b --webhook w "
    line += "--webhook-certificate cert-manager --image-prefix r/ --device cpu --port 9 "
    line += "--image gateway=r/own@sha256:ab"
    assert main.main(line.split()) == 0
    (options,) = ran
    assert options.identity.startswith("me_")
    assert (options.settings.namespace, options.namespaces, options.port) == ("here", ("a", "b"), 9)
    assert options.webhook == WebhookOptions("w", certificate="cert-manager")
    assert options.settings.device == "cpu"
    assert options.settings.images == Images("r/", {"gateway": "r/own@sha256:ab"})


def test_pods_are_restricted_by_the_charts_lists(
    ran: list[ManagerOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    main.main([])
    main.main(['--restrict-pods={"env": ["A"]}'])
    assert [each.settings.allow_lists for each in ran] == [None, {"env": ("A",)}]
    with pytest.raises(SystemExit):
        main.main(['--restrict-pods={"what": []}'])
    assert "argument --restrict-pods: what: there is no such list" in capsys.readouterr().err


def test_two_processes_of_one_pod_are_two_operators(ran: list[ManagerOptions]) -> None:
    main.main(["--identity", "me"])
    main.main(["--identity", "me"])
    assert ran[0].identity != ran[1].identity


def test_a_faulty_cluster_file_is_one_line_and_exit_code_2(
    ran: list[ManagerOptions], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: []")
    assert main.main(["--cluster", str(file)]) == 2
    assert not ran
    assert caplog.messages == ["--cluster: nodes: must have at least 1 entry"]


@pytest.mark.parametrize("line", ["--device tpu", "--image operator=x", "--image gateway="])
def test_bad_usage_is_exit_code_2(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == 2


async def test_the_pages_say_what_is_wrong_and_what_was_counted() -> None:
    faults: list[str] = []
    metrics = OperatorMetrics()
    metrics.record_reconcile("InstancePool", "idle", 0.002)
    metrics.actions["Create", "done"] += 3
    registry = CollectorRegistry()
    registry.register(
        OperatorCollector(
            metrics,
            queued=lambda: 4,
            objects=lambda: {"Pod": 2},
            is_leading=lambda: True,
            statuses=dict,
        )
    )
    pages = OperatorEndpoints(
        alive=lambda: faults, ready=lambda: ["not listed yet"], registry=registry
    )
    await pages.start(["127.0.0.1"], 0)
    assert pages.port
    base = f"http://127.0.0.1:{pages.port}"
    try:
        async with aiohttp.ClientSession() as session:

            async def get(path: str) -> tuple[int, str]:
                async with session.get(base + path) as answer:
                    return answer.status, await answer.text()

            assert await get("/healthz") == (200, "ok")
            faults.append("the watch of Pod has ended")
            assert await get("/healthz") == (503, "the watch of Pod has ended")
            assert await get("/readyz") == (503, "not listed yet")
            status, text = await get("/metrics")
    finally:
        await pages.stop()
    assert status == 200
    for line in (
        'cleave_operator_reconciles_total{kind="InstancePool",outcome="idle"} 1.0',
        'cleave_operator_actions_total{action="Create",outcome="done"} 3.0',
        'cleave_operator_reconcile_seconds_bucket{kind="InstancePool",le="0.0025"} 1.0',
        "cleave_operator_queue_depth 4.0",
        "cleave_operator_leading 1.0",
        'cleave_operator_objects{kind="Pod"} 2.0',
    ):
        assert line in text


class TestHandlers:
    """The settings that kopf gets."""

    def test_every_kind_that_is_listed_is_watched_and_nothing_else(self) -> None:
        found = handlers.build_registry(
            Controller(OperatorSettings(), OperatorMetrics()), OperatorMetrics()
        )
        watched = {str(each.selector.any_name) for each in found._watching.get_all_handlers()}
        assert watched == {
            "nodes", "llmdeployments", "instancepools", "pods", "deployments", "services",
            "poddisruptionbudgets", "serviceaccounts", "roles", "rolebindings",
            "networkpolicies", "resourcequotas",
        }  # fmt: skip
        assert len(watched) == len(WATCHED_KINDS)
        assert not found._changing.get_all_handlers()
        assert not found._spawning.get_all_handlers()

    async def test_events_fill_the_index(self) -> None:
        metrics = OperatorMetrics()
        controller = Controller(OperatorSettings(), metrics)
        found = handlers.build_registry(controller, metrics)
        message = next(
            each.fn for each in found._watching.get_all_handlers() if each.id == "LLMDeployment"
        )
        resource = chat()
        resource["metadata"] |= {"uid": "u1", "resourceVersion": "1"}
        await message(event={"type": None, "object": resource})
        assert list(controller.cache.list_resources()) == [
            ResourceKey("LLMDeployment", "default", "chat")
        ]
        await message(event={"type": "DELETED", "object": resource})
        assert not list(controller.cache.list_resources())
        assert metrics.events == {("LLMDeployment", "LISTED"): 1, ("LLMDeployment", "DELETED"): 1}

    def test_kopf_writes_nothing_and_lists_what_is_ours(self) -> None:
        chosen = handlers.build_settings()
        assert not chosen.posting.enabled
        assert chosen.scanning.disabled
        selectors = dict(chosen.watching.label_selectors.items())
        assert {str(key.any_name): text for key, text in selectors.items()} == {
            "pods": "cleave.dev/component",
            "deployments": "cleave.dev/deployment",
            "services": "cleave.dev/deployment",
            "poddisruptionbudgets": "cleave.dev/deployment",
            "serviceaccounts": "cleave.dev/deployment",
            "roles": "cleave.dev/deployment",
            "rolebindings": "cleave.dev/deployment",
            "networkpolicies": "cleave.dev/deployment",
        }
        storage = chosen.persistence.diffbase_storage
        assert storage.build(body=kopf.Body({}), extra_fields=None) == {}


@pytest.mark.parametrize("url", ["prometheus:9090", "http://a:b@prometheus", "http://p/x?y=1"])
def test_a_prometheus_is_named_by_a_plain_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["--prometheus", url])
    assert f"--prometheus: '{url}': must be like http://prometheus.monitoring:9090" in (
        capsys.readouterr().err
    )
