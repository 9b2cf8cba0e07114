"""What decides the KV of an engine, by its command line."""

import pytest

from cleave.controller.author_policy.engine_flags import RISKS
from cleave_worker.agent.weights.weight_sources import WeightSource, list_sources


def list_names(*arguments: str, model: str = "/m") -> list[tuple[str, str, str, str]]:
    found = list_sources(model, arguments)
    return [(each.use, each.name, each.revision, each.pin) for each in found]


def test_a_model_is_pinned_to_a_commit_of_its_branch() -> None:
    assert list_names(model="org/m") == [("--model", "org/m", "", "--revision")]
    expected = [("--model", "org/m", "v2", "--revision")]
    assert list_names("--revision", "v1", "--revision=v2", model="org/m") == expected
    # Arguments of the engine come last.
    assert list_names("--model=/other") == [("--model", "/other", "", "--revision")]


def test_a_config_elsewhere_leaves_the_model_unpinned_as_vllm_uses_one_revision_for_both() -> None:
    names = list_names("--hf-config-path", "org/config", model="org/m")
    assert names == [("--model", "org/m", "", ""), ("--hf-config-path", "org/config", "", "")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--tokenizer", "org/t", "--tokenizer-revision", "v1"],
            ("--tokenizer", "org/t", "v1", "--tokenizer-revision"),
        ),
        (["--model-weights", "s3://b/m"], ("--model-weights", "s3://b/m", "", "")),
        (
            ["--speculative-config", '{"model": "org/eagle", "revision": "r"}'],
            ("--speculative-config", "org/eagle", "r", ""),
        ),
        (["--speculative-config.model=/eagle"], ("--speculative-config", "/eagle", "", "")),
        (["--spec-model", "/eagle"], ("--speculative-config", "/eagle", "", "")),
        (["--lora-modules", "sql=/a/sql"], ("--lora-modules sql", "/a/sql", "", "")),
        (
            ["--lora_modules", '{"name": "sql", "path": "org/sql", "base_model_name": "m"}'],
            ("--lora-modules sql", "org/sql", "", ""),
        ),
        (['--default-mm-loras={"audio": "/a"}'], ("--default-mm-loras audio", "/a", "", "")),
        (["--chat-template", "/t.jinja"], ("--chat-template", "/t.jinja", "", "")),
    ],
)
def test_all_that_decides_kv_is_listed(arguments: list[str], expected: tuple[str, ...]) -> None:
    assert list_names(*arguments)[1:] == [expected]


def test_several_adapters_are_each_listed() -> None:
    uses = [each[0] for each in list_names("--lora-modules", "a=/1", "b=/2", "--seed", "1")]
    assert uses == ["--model", "--lora-modules a", "--lora-modules b"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", "{"],
        ["--speculative-config", "[1]"],
        ["--speculative-config", '{"model": "ngram", "num_speculative_tokens": 3}'],
        ["--lora-modules", "{"],
        ["--lora-modules", "name"],
        ["--default-mm-loras", "1"],
        ["--seed", "1", "--allowed-local-media-path", "/media"],
    ],
)
def test_what_is_no_source_is_left_to_the_engine(arguments: list[str]) -> None:
    assert list_sources("/m", arguments) == [WeightSource("--model", "/m", "", "--revision")]


OTHER_OPTIONS = """
    additional-config attention-config aux-output-config compilation-config config-format
    diffusion-config distributed-executor-backend enable-mm-embeds enable-prompt-embeds
    engram-config hf-overrides io-processor-plugin ir-op-priority kernel-config
    kv-offloading-backend log-config-file logging-config logits-processors media-io-kwargs
    middleware mm-processor-kwargs model-class-overrides pt-load-map-location quantization-config
    ray-workers-use-nsight reasoning-parser-plugin scheduler-cls spec-method
    structured-outputs-config tokenizer-mode tool-parser-plugin trust-remote-code
    trust-request-chat-template trust-request-mm-kwargs worker-cls worker-extension-cls
    latency allowed-local-media-path download-dir enable-ssl-refresh generation-config
    mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path profiler-config ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile uds allow-credentials allowed-headers
    allowed-media-domains allowed-methods allowed-origins collect-detailed-traces
    elastic-ep-max-dp-size enable-elastic-ep enable-fault-tolerance enable-scale-out
    fault-tolerance-config hf-token otlp-traces-endpoint root-path tool-server
"""
"""Their values are part of the revision; files that they name are of the image, or decide no KV."""
LIMITS = ["code-revision", "weight-transfer-config"]
"""Code of another repository, and weights that a running engine is sent
(docs/decisions/weights-and-adapters.md)."""
REFUSED = ["api-key", "config"]


def test_every_option_of_vllm_that_may_load_something_is_read_or_decides_no_kv() -> None:
    """`RISKS` has all of vLLM's options besides harmless ones."""
    kinds = ("may load code", "reads or writes files", "opens connections or the API")
    risky = {option for option, risk in RISKS.items() if risk in kinds}
    values = ("/x", "a=/x", '{"model": "/x"}')
    read = {
        option for option in risky for value in values if list_names(option, value) != list_names()
    }
    unread = {option.removeprefix("--") for option in risky - read}
    assert unread == {*OTHER_OPTIONS.split(), *LIMITS, *REFUSED}


def test_a_folder_of_speculators_lists_the_model_that_is_loaded_in_its_place(tmp_path) -> None:
    """As vLLM does (`maybe_override_with_speculators`); what it cannot read is not ours to say."""
    config = tmp_path / "config.json"
    config.write_text('{"speculators_config": {"verifier": {"name_or_path": "org/base"}}}')
    names = [name for _, name, _, _ in list_names(model=str(tmp_path))]
    assert names == [str(tmp_path), "org/base"]
    for text in (
        "{",
        "[]",
        '{"speculators_config": 1}',
        '{"speculators_config": {"verifier": {}}}',
    ):
        config.write_text(text)
        assert [name for _, name, _, _ in list_names(model=str(tmp_path))] == [str(tmp_path)]
    config.write_bytes(b"\xff" + b"[" * 100_000)
    assert [name for _, name, _, _ in list_names(model=str(tmp_path))] == [str(tmp_path)]
