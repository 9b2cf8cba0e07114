"""Arguments that engines' parsers would refuse. vLLM's own parser is compared in
tests/controller/author_policy/test_engine_flags.py."""

import pytest

from cleave.api.pods.engine_flags import (
    EngineFlag,
    list_unknown,
    list_wrong_values,
    load_parser,
)

VLLM, EMULATED = load_parser("vLLM"), load_parser("Emulated")


def describe_flags() -> dict[str, EngineFlag]:
    import scripts.engine_flags as written

    return {
        name: EngineFlag(**{**parts, "choices": tuple(parts.get("choices", ()))})
        for name, parts in written.describe(written.build_emulator_parser()).items()
    }


def test_the_file_has_the_emulated_engines_flags() -> None:
    assert describe_flags() == EMULATED.flags


@pytest.mark.parametrize(
    ("arg", "name", "remedy"),
    [
        ("--rope-scaling", "", 'write --hf-overrides {"rope_parameters": {...}}'),
        ("--disable-log-requests", "", "remove it: requests are logged with --enable-log-reques"),
        ("--max-num-seq", "", "did you mean --max-num-seqs?"),
        ("--gpu_memory_utilisation=0.9", "--gpu-memory-utilisation", "did you mean --gpu-memory-"),
        ("--no-max-num-seqs", "", "did you mean --max-num-seqs?"),
        ("--zzz", "", "remove it"),
    ],
)
def test_flags_that_vllm_has_not_are_named_with_the_nearest(
    arg: str, name: str, remedy: str
) -> None:
    (found,) = list_unknown([arg, "x"], VLLM)
    assert found.startswith(f"{name or arg}: vLLM 0.32.0 has no such flag; {remedy}")


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["--tool-call-parser", "qwen3coder"], "has no qwen3coder; did you mean qwen3_coder?"),
        (["--reasoning_parser=deepseek-r1"], "has no deepseek-r1; did you mean deepseek_r1?"),
        (["--reasoning-parser", "zzz"], "has no zzz; it has cohere_command3, "),
        (["--tool-call-parser", "mine", "--tool-parser-plugin", "/x/mine.py"], None),
        (["--tool-call-parser", "hermes", "--reasoning-parser=$(PARSER)"], None),
    ],
)
def test_parsers_that_vllm_has_not_are_named_unless_a_plugin_has_them(
    args: list[str], wrong: str | None
) -> None:
    found = list(list_unknown(args, VLLM))
    assert all(wrong in each for each in found) if wrong else not found
    assert len(found) == bool(wrong)


STRAY = "engines take it for the name of a model"


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["--kv-transfer-config", "{'a': 1}"], "is not JSON: Expecting property name enclosed in"),
        (["--kv-transfer-config", "{'a': 1}"], "at character 2; JSON has double quotes (got "),
        (["--speculative-config=5"], "must be a JSON object, as in {\"name\": 1} (got '5')"),
        (["--compilation-config", '{"a": 1'], "is not JSON: Expecting ',' delimiter at character"),
        (["--hf-overrides", '{"a" 1}'], "is not JSON: Expecting ':' delimiter at character 6"),
        (["--override-generation-config", "[]"], "must be a JSON object"),
        (["--max-num-seqs", "many"], "must be a whole number (got 'many')"),
        (["--max-num-batched-tokens", "8x"], "must be a whole number, such as 8192 or 8k (got"),
        (["--gpu-memory-utilization", "90%"], "must be a number (got '90%')"),
        (["--gpu-memory-utilization", "1.1"], "must be above 0 and at most 1 (got '1.1')"),
        (["--gpu-memory-utilization=0"], "must be above 0 and at most 1"),
        (["--max-num-seqs", "0"], "must be at least 1 (got '0')"),
        (["--max-num-batched-tokens", "-8192"], "must be at least 1"),
        (["--kv-cache-dtype", "fp9"], "did you mean fp8? (got 'fp9')"),
        (["--enforce-eager=true"], "takes no value (got 'true')"),
        (["--enable-prefix-caching", "true"], "takes no value (got 'true')"),
        (["--seed"], "needs a value"),
        (["--seed", "--enforce-eager"], "needs a value"),
    ],
)
def test_values_that_vllm_would_refuse_are_named(args: list[str], wrong: str) -> None:
    (found,) = list_wrong_values(args, VLLM)
    assert found.startswith(args[0].split("=")[0] + ": ")
    assert wrong in found


def test_words_that_belong_to_no_flag_are_named() -> None:
    assert list(list_wrong_values(["org/model"], VLLM)) == [
        f"'org/model': no flag takes it: {STRAY}"
    ]
    assert list(list_wrong_values(["--block-size", "16", "32"], VLLM)) == [
        f"'32': --block-size takes no more: {STRAY}"
    ]


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching"],
        ["--max_num_batched_tokens=8k", "--gpu-memory-utilization", ".9", "--seed", "-1"],
        ["--kv-transfer-config", '{"kv_connector": "NixlConnector"}', "--hf-overrides", "module.f"],
        ["--cudagraph-capture-sizes", "1", "2", "4", "--lora-modules", "a=b", "c=d"],
        ["--speculative-config", "None", "--otlp-traces-endpoint", "$(POD_IP)", "--seed", "$(A)"],
        [],
    ],
)
def test_what_vllm_takes_is_taken(args: list[str]) -> None:
    assert not [*list_unknown(args, VLLM), *list_wrong_values(args, VLLM)]


def test_deep_json_is_refused() -> None:
    (found,) = list_wrong_values(["--hf-overrides", '{"a":' * 3000 + "1" + "}" * 3000], VLLM)
    assert "is not JSON" in found


def test_the_emulated_engine_has_flags_of_its_own() -> None:
    (found,) = list_unknown(["--attention-backend", "x", "--fault-injection"], EMULATED)
    assert found.startswith("--attention-backend: the emulated engine has no such flag")
