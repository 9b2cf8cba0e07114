"""KV from a vLLM engine with plugins of the version before to one of this version."""

from pathlib import Path

import pytest

from e2e.support.deployments import deployed, start_fast, tiny_vllm
from e2e.support.vllm_prompts import CASES, ask, engine_url, metric
from tests.support.previous_version import extract

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_vllm_engine_takes_kv_from_one_with_plugins_of_the_previous_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    previous = extract(tmp_path / "previous")
    choice = previous.choose_for("-prefill-", tmp_path / "choice")
    env = [{"name": "PYTHONPATH", "value": str(choice)}]
    # Less than is usual for vLLM: the model is small, and other tests run engines as well.
    room = {"requests": {"memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    manifest = tiny_vllm(
        tiny_model,
        pools={"flipping": "Off"},
        engine=start_fast(env=env),
        template={"resources": room},
    )
    with deployed(manifest, tmp_path, 420) as deployment:
        assert set((choice / "chosen").read_text().split()) == {"tiny-prefill-0"}
        decode = engine_url(deployment, "decode")
        pulled = (
            'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
        )
        before = metric(decode, pulled)
        split = [ask(deployment.url, case) for case in CASES]
        moved = metric(decode, pulled) - before
        assert moved == sum(answer.prompt_tokens for answer in split)
        colocated = [ask(engine_url(deployment, "prefill"), case) for case in CASES]
        assert [each.tokens for each in split] == [each.tokens for each in colocated]
