"""vLLM on CPU as data-parallel ranks that share the experts of a tiny model (EP)."""

import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cleave.local.tiny_model import TinyModelShape, build
from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm, until
from e2e.support.spread_ranks import SpreadRanks, spread
from e2e.support.vllm_prompts import CASES, Case, ask, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]

RANKS = {"data": 2, "expert": True}
START_S = 420
CHOSEN = [case for case in CASES if case.prompt_tokens <= 1_000]


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with four experts."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path, TinyModelShape(experts=4))
    return path


def build_manifest(model: Path, *pools: dict[str, Any], **spec: Any) -> dict[str, object]:
    # Less than is usual for vLLM: the model is small.
    amounts = {"memory": "3Gi", "cpu": "900m"}
    template = {"resources": {"requests": amounts, "limits": amounts}}
    return tiny_vllm(model, placement={"manual": list(pools)}, template=template, **spec)


@contextmanager
def running(model: Path, folder: Path, *pools: dict[str, Any], **spec: Any) -> Iterator[Deployment]:
    """A deployment whose engines share the cores of a small machine."""
    folder.mkdir()
    manifest = build_manifest(model, *pools, **spec)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CLEAVE_ALLOW_SHARED_CORES", "1")
        with deployed(manifest, folder, timeout_s=START_S) as deployment:
            yield deployment


@pytest.fixture(scope="module")
def expected(sparse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[int]]:
    """The tokens of one engine alone."""
    folder = tmp_path_factory.mktemp("alone") / "d"
    with running(sparse_model, folder, {"role": "mixed"}, engine=start_fast()) as alone:
        return {case: ask(alone.url, case).tokens for case in CHOSEN}


def ask_all(deployment: Deployment | SpreadRanks) -> dict[Case, list[int]]:
    """The tokens, of which every engine must have computed some."""
    before = count_requests(deployment)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda case: ask(deployment.url, case).tokens, CHOSEN)
        tokens = dict(zip(CHOSEN, answers, strict=True))
    after = count_requests(deployment)
    assert all(after[name] > count for name, count in before.items()), (before, after)
    return tokens


def count_requests(deployment: Deployment | SpreadRanks) -> dict[str, float]:
    """Requests that each engine has finished, by its name."""
    return {
        name: metric(each.engine_url, "vllm:request_success_total")
        for name, each in deployment.instances().items()
    }


def test_ranks_on_two_nodes_answer_as_one_engine_and_are_restarted_together(
    sparse_model: Path, expected: dict[Case, list[int]], tmp_path: Path
) -> None:
    manifest = build_manifest(sparse_model, {"role": "mixed", "parallelism": RANKS})
    with spread(manifest, tmp_path / "d") as ranks:
        until(lambda: len(list_ready(ranks)) == 2, START_S, "both engines are ready")
        before = ranks.instances()
        assert before.keys() == {"tiny-mixed-0.rank-0", "tiny-mixed-0.rank-1"}
        assert ask_all(ranks) == expected

        # The loss of a node, and the pod that comes in its place.
        ranks.pods[1].kill()
        until(lambda: not list_ready(ranks), START_S, "the other engine is stopped")
        ranks.pods[1].start(ranks.env)
        until(lambda: are_restarted(ranks, before), START_S, "both engines are new and ready")
        assert ask_all(ranks) == expected


def test_instances_of_ranks_on_two_nodes_change_their_role_and_drain(
    sparse_model: Path, expected: dict[Case, list[int]], tmp_path: Path
) -> None:
    pool = {"role": "mixed", "replicas": 2, "parallelism": RANKS}
    with spread(build_manifest(sparse_model, pool), tmp_path / "d") as ranks:
        until(lambda: ranks.are_verified(4), 2 * START_S, "every rank has handed KV over")
        boots = {name: each.boot_id for name, each in ranks.instances().items()}
        assert ask_all(ranks) == expected

        ranks.set_role("tiny-mixed-0", agent_pb2.ROLE_PREFILL)
        flipped = [name for name in boots if name.startswith("tiny-mixed-0")]
        roles = {name: each.role for name, each in ranks.instances().items()}
        assert all((roles[name] == agent_pb2.ROLE_PREFILL) == (name in flipped) for name in roles)
        assert ask_all(ranks) == expected
        assert metric(ranks.url, 'cleave_gateway_handoffs_total{result="used"}') > 0
        ranks.set_role("tiny-mixed-0", agent_pb2.ROLE_MIXED)
        assert {name: each.boot_id for name, each in ranks.instances().items()} == boots

        # The deletion of one pod drains its instance on both nodes, and no answer is lost.
        urls = [each.engine_url for name, each in ranks.instances().items() if name not in flipped]
        with concurrent.futures.ThreadPoolExecutor(len(CHOSEN)) as clients:
            answers = [clients.submit(ask, ranks.url, case) for case in CHOSEN]
            until(
                lambda: any(metric(url, "vllm:num_requests_running") > 0 for url in urls),
                START_S,
                "the instance computes answers",
            )
            first, further = ranks.pods[2:]
            assert further.stop() == 0
            assert first.process is not None
            assert first.process.wait(START_S) == 0
            tokens = [each.result(START_S).tokens for each in answers]
        assert tokens == [expected[case] for case in CHOSEN]
        assert {*ranks.instances()} == {*flipped}


def list_ready(ranks: SpreadRanks) -> list[str]:
    found = ranks.instances().items()
    return [name for name, each in found if each.state == agent_pb2.STATE_READY]


def are_restarted(ranks: SpreadRanks, before: dict[str, agent_pb2.Registration]) -> bool:
    now = ranks.instances()
    return now.keys() == before.keys() and all(
        each.state == agent_pb2.STATE_READY and each.boot_id != before[name].boot_id
        for name, each in now.items()
    )


def test_ranks_hand_over_to_ranks(
    sparse_model: Path, expected: dict[Case, list[int]], tmp_path: Path
) -> None:
    check_handoffs(sparse_model, expected, tmp_path / "d", "Cleave")


def check_handoffs(
    model: Path, expected: dict[Case, list[int]], folder: Path, connector: str
) -> None:
    """Two prefill ranks hand over to two decode ranks, and all tokens are as expected."""
    pools = [{"role": role, "parallelism": RANKS} for role in ("prefill", "decode")]
    with running(model, folder, *pools, engine={"connector": connector}) as pairs:
        ready = pairs.instances()
        assert len(ready) == 4
        assert all(each.kv_path.verified for each in ready.values())
        assert ask_all(pairs) == expected
        assert metric(pairs.url, 'cleave_gateway_handoffs_total{result="used"}') >= len(CHOSEN)
