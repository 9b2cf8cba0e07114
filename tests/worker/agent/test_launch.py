"""Arguments and environment of an engine."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV, TOKEN_ENV
from cleave_worker.access.engine_access import MIDDLEWARE
from cleave_worker.agent.config import AgentConfig, AgentTiming
from cleave_worker.agent.launch import (
    Boot,
    Launch,
    LaunchError,
    MeetingPoint,
    build_engine_launch,
    build_headless_launch,
    create_boot_id,
    find_cache_faults,
    read_block_size,
)

BOOT = Boot("boot1", 8001, 5601, Path("/run/x/load"), cores=(2,), prefix_port=5602)
ON_GPU = replace(BOOT, gpu=True, cores=())
ConfigOf = Callable[..., AgentConfig]


def option(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def test_the_boot_id_is_the_engine_id_of_the_kv_transfer(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), BOOT, {})
    assert json.loads(option(launch, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "engine_id": "boot1",
    }


def test_the_own_connector_recomputes_what_it_refuses_and_serves_on_the_pods_address(
    config_of: ConfigOf,
) -> None:
    given = ("--kv-transfer-config", '{"kv_connector_extra_config": {"transports": ["gloo"]}}')
    config = config_of(engine="vllm", connector="cleave", engine_args=given)
    assert json.loads(option(build_engine_launch(config, BOOT, {}), "--kv-transfer-config")) == {
        "kv_connector": "CleaveConnector",
        "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host": config.host,
            "port": 5601,
            "prefix_port": 5602,
            "transports": ["gloo"],
        },
        "engine_id": "boot1",
    }


def test_the_own_connector_gets_the_transfer_size(config_of: ConfigOf) -> None:
    config = config_of(engine="vllm", connector="cleave", transfer="perchunk")
    output = json.loads(option(build_engine_launch(config, BOOT, {}), "--kv-transfer-config"))
    assert output["kv_connector_extra_config"]["granularity"] == "chunk"


@pytest.mark.parametrize("connector", ["cleave", "nixl"])
@pytest.mark.parametrize("given", [("--kv-offloading-size", "20"), ("--kv-offloading-size=20",)])
def test_host_memory_is_used_beside_the_connector_of_handoffs(
    config_of: ConfigOf, connector: str, given: tuple[str, ...]
) -> None:
    config = config_of(engine="vllm", connector=connector, engine_args=(*given, "--seed", "1"))
    boot = replace(BOOT, gpu=True)
    plain = replace(config, engine_args=())
    alone = json.loads(option(build_engine_launch(plain, boot, {}), "--kv-transfer-config"))
    launch = build_engine_launch(config, boot, {})
    assert not any(each.startswith("--kv-offloading-size") for each in launch.argv)
    assert launch.argv[-2:] == ("--seed", "1")
    output = json.loads(option(launch, "--kv-transfer-config"))
    own, offloading = output["kv_connector_extra_config"]["connectors"]
    assert output["kv_connector"] == "MultiConnector"
    # The connectors get it from the one that has them.
    assert own | {"engine_id": output["engine_id"]} == alone
    assert output.get("kv_load_failure_policy") == alone.get("kv_load_failure_policy")
    assert offloading["kv_connector_extra_config"] == {"cpu_bytes_to_use": 20 << 30}
    assert offloading["kv_connector_module_path"] == "cleave_worker.vllm.kv.offloading_connector"
    assert "kv_connector_module_path" not in output


def test_an_emulated_engine_gets_the_size_of_host_memory(config_of: ConfigOf) -> None:
    config = config_of(engine="emulated", engine_args=("--kv-offloading-size", "20"))
    launch = build_engine_launch(config, BOOT, {})
    assert option(launch, "--kv-offloading-size") == "20"
    assert json.loads(option(launch, "--kv-transfer-config"))["kv_connector"] == "NixlConnector"


def test_host_memory_beside_a_cpu_is_refused(config_of: ConfigOf) -> None:
    config = config_of(engine="vllm", engine_args=("--kv-offloading-size", "20"))
    with pytest.raises(LaunchError, match=r"20: .* GPUs only; remove spec.engine.kvOffloadingGib"):
        build_engine_launch(config, BOOT, {})


def test_vllm_on_cpu_is_bound_to_its_cores(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), BOOT, {"HOME": "/h"})
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "2"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert launch.env["HOME"] == "/h"
    assert "--enforce-eager" in launch.argv


def test_an_engine_on_one_core_starts_with_the_environment_of_its_worker(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package, library in (("vllm", "libs/libtcmalloc.so.4"), ("torch", "lib/libgomp.so.1")):
        (tmp_path / package / library).parent.mkdir(parents=True)
        (tmp_path / package / library).touch()
        (tmp_path / package / "__init__.py").touch()

    def find(package: str) -> ModuleSpec:
        return ModuleSpec(package, None, origin=str(tmp_path / package / "__init__.py"))

    monkeypatch.setattr("cleave_worker.agent.launch.importlib.util.find_spec", find)
    env = build_engine_launch(config_of(engine="vllm"), BOOT, {}).env
    assert env["OMP_NUM_THREADS"] == "1"
    libraries = ["vllm/libs/libtcmalloc.so.4", "torch/lib/libgomp.so.1"]
    assert env["LD_PRELOAD"].split(":") == [str(tmp_path / library) for library in libraries]

    of_user = build_engine_launch(config_of(engine="vllm"), BOOT, {"LD_PRELOAD": "libiomp5.so"}).env
    assert (of_user["LD_PRELOAD"], of_user.get("OMP_NUM_THREADS")) == ("libiomp5.so", None)
    two_cores = replace(BOOT, cores=(2, 3))
    assert "LD_PRELOAD" not in build_engine_launch(config_of(engine="vllm"), two_cores, {}).env


SWITCHES = ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY")


@pytest.mark.parametrize("engine", ["vllm", "emulated"])
def test_usage_statistics_are_off_unless_a_variable_turns_them_on(
    config_of: ConfigOf, engine: str
) -> None:
    for build in (build_engine_launch, build_headless_launch):
        for given, expected in (({}, "1"), ({"DO_NOT_TRACK": "0"}, "0")):
            env = build(config_of(engine=engine), BOOT, given).env
            assert [env[name] for name in SWITCHES] == [expected] * 4
        of_user = build(config_of(engine=engine), BOOT, {"VLLM_NO_USAGE_STATS": "0"}).env
        assert (of_user["VLLM_NO_USAGE_STATS"], of_user["DO_NOT_TRACK"]) == ("0", "1")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("given", "is_sent"), [({}, False), ({"DO_NOT_TRACK": "0"}, True)])
def test_vllm_itself_says_that_statistics_are_off(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], is_sent: bool
) -> None:
    from vllm.usage import usage_lib

    env = build_engine_launch(config_of(engine="vllm"), BOOT, given).env
    for name in SWITCHES:
        monkeypatch.setenv(name, env[name])
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    assert usage_lib.is_usage_stats_enabled() is is_sent


def test_stages_on_cpu_are_warmed_up_for_they_need_their_buffers(config_of: ConfigOf) -> None:
    config = replace(config_of(engine="vllm"), pipeline_parallel_size=2)
    launch = build_engine_launch(config, replace(BOOT, cores=(2, 3)), {})
    assert "--enforce-eager" not in launch.argv
    assert json.loads(option(launch, "--compilation-config")) == {"mode": 1, "backend": "eager"}


def test_vllm_on_a_gpu_gets_no_cpu_settings(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), ON_GPU, {})
    assert not [name for name in launch.env if name.startswith("VLLM_CPU")]
    assert "--enforce-eager" not in launch.argv
    assert "kv_buffer_device" not in option(launch, "--kv-transfer-config")


def test_vllm_on_a_gpu_without_nvcc_keeps_to_kernels_that_are_there(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), ON_GPU, {"CUDA_HOME": "/nonexistent"})
    assert launch.env["VLLM_USE_FLASHINFER_SAMPLER"] == launch.env["VLLM_USE_DEEP_GEMM"] == "0"
    assert option(launch, "--gdn-prefill-backend") == "triton"


def test_a_process_of_an_engine_on_a_gpu_finds_the_run_time_compiler_of_cudas_wheels(
    config_of: ConfigOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "cu13" / "lib" / "libnvrtc-builtins.so.13.0"
    library.parent.mkdir(parents=True)
    library.touch()
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("cleave_worker.agent.launch.importlib.util.find_spec", {"nvidia": spec}.get)
    base = {"CUDA_HOME": "/nonexistent", "LD_LIBRARY_PATH": "/first"}
    env = build_engine_launch(config_of(engine="vllm"), ON_GPU, base).env
    assert env["LD_LIBRARY_PATH"] == f"/first:{library.parent}"


def test_what_a_user_says_of_kernels_holds(config_of: ConfigOf) -> None:
    config = config_of(engine="vllm", engine_args=("--gdn-prefill-backend", "flashinfer"))
    env = {"CUDA_HOME": "/nonexistent", "VLLM_USE_FLASHINFER_SAMPLER": "1"}
    launch = build_engine_launch(config, ON_GPU, env)
    assert launch.env["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert launch.argv[-1] == "flashinfer", "the last one counts"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_vllm_on_a_gpu_with_nvcc_is_as_it_comes(
    config_of: ConfigOf, tmp_path: Path, variable: str
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    place = nvcc.parent if variable == "PATH" else tmp_path
    launch = build_engine_launch(config_of(engine="vllm"), ON_GPU, {variable: str(place)})
    assert not {name for name in launch.env if name.startswith("VLLM_USE")}
    assert "--gdn-prefill-backend" not in launch.argv


@pytest.mark.parametrize(
    ("domains", "expected"), [((), ["none.invalid"]), (("a.example", "b"), ["a.example", "b"])]
)
def test_vllm_fetches_media_from_declared_hosts_only(
    config_of: ConfigOf, domains: tuple[str, ...], expected: list[str]
) -> None:
    launch = build_engine_launch(config_of(engine="vllm", media_domains=domains), BOOT, {})
    start = launch.argv.index("--allowed-media-domains") + 1
    assert list(launch.argv[start : start + len(expected)]) == expected
    assert launch.argv[start + len(expected)].startswith("--")
    assert launch.env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


def test_requests_are_never_logged(config_of: ConfigOf) -> None:
    assert (
        "--no-enable-log-requests" in build_engine_launch(config_of(engine="vllm"), BOOT, {}).argv
    )


def test_engine_and_kv_side_channel_listen_on_the_pods_address(config: AgentConfig) -> None:
    launch = build_engine_launch(config, BOOT, {})
    assert option(launch, "--host") == config.host
    assert option(launch, "--port") == "8001"
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == config.host
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert launch.env["CLEAVE_LOAD_PAGE"] == "/run/x/load"


def test_an_engine_without_terms_is_as_it_comes(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), BOOT, {})
    assert "--scheduler-cls" not in launch.argv
    assert "CLEAVE_SCHEDULING_PAGE" not in launch.env


def test_an_engine_with_terms_follows_their_page(config_of: ConfigOf) -> None:
    boot = replace(BOOT, scheduling_page=Path("/run/x/scheduling"))
    launch = build_engine_launch(config_of(engine="vllm"), boot, {})
    assert option(launch, "--scheduler-cls") == "cleave_worker.vllm.scheduler.make_scheduler"
    assert launch.env["CLEAVE_SCHEDULING_PAGE"] == "/run/x/scheduling"
    with pytest.raises(LaunchError, match="exclude each other"):
        build_engine_launch(config_of(engine="vllm", engine_args=("--scheduler-cls=x",)), boot, {})


@pytest.mark.parametrize("joined", [True, False])
def test_the_users_kv_settings_are_merged_and_the_boot_id_wins(
    config_of: ConfigOf, joined: bool
) -> None:
    name, settings = "--kv-transfer-config", '{"engine_id": "x", "kv_load_failure_policy": "fail"}'
    given = (f"{name}={settings}",) if joined else (name, settings)
    launch = build_engine_launch(config_of(engine_args=("--seed", "1", *given)), BOOT, {})
    merged = json.loads(option(launch, name))
    assert merged["engine_id"] == "boot1"
    assert merged["kv_load_failure_policy"] == "fail"
    assert [argument for argument in launch.argv if argument.startswith(name)] == [name]
    assert launch.argv[-2:] == ("--seed", "1")


@pytest.mark.parametrize("text", ["nonsense", "[]"])
def test_kv_settings_that_are_no_object_are_refused(config_of: ConfigOf, text: str) -> None:
    with pytest.raises(LaunchError):
        build_engine_launch(config_of(engine_args=("--kv-transfer-config", text)), BOOT, {})


def test_a_local_model_keeps_the_engine_off_the_hub(config_of: ConfigOf, tmp_path: Path) -> None:
    assert (
        build_engine_launch(config_of(model=str(tmp_path)), BOOT, {}).env["HF_HUB_OFFLINE"] == "1"
    )
    assert "HF_HUB_OFFLINE" not in build_engine_launch(config_of(model="org/model"), BOOT, {}).env


def test_the_block_size_is_the_command_lines_or_the_engines_default(config_of: ConfigOf) -> None:
    assert read_block_size(config_of(engine_args=("--block-size=32",)), gpu=False) == 32
    assert read_block_size(config_of(engine="vllm"), gpu=False) == 128
    assert read_block_size(config_of(engine="vllm"), gpu=True) == 16


def test_vllm_may_start_for_as_long_as_the_agent_waits(config_of: ConfigOf) -> None:
    config = config_of(engine="vllm", timing=AgentTiming(start_timeout=2310.5))
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    assert build_engine_launch(config, ON_GPU, {}).env[name] == "2311"
    assert build_engine_launch(config, ON_GPU, {name: "60"}).env[name] == "60"


def test_folders_for_compiled_kernels_are_made_and_faults_are_by_variable(tmp_path: Path) -> None:
    folder = tmp_path / "compiled" / "vllm"
    assert find_cache_faults({"VLLM_CACHE_ROOT": str(folder)}) == {}
    assert folder.is_dir()
    assert find_cache_faults({}) == {}
    (tmp_path / "file").touch()
    bad = {"TRITON_CACHE_DIR": str(tmp_path / "file" / "triton")}
    faults = find_cache_faults({"VLLM_CACHE_ROOT": str(folder), **bad})
    assert faults.keys() == bad.keys()
    (text,) = faults.values()
    assert text.startswith("TRITON_CACHE_DIR: Not a directory: ")
    assert "spec.model.cache" in text


def test_a_connector_named_in_the_engines_arguments_replaces_cleaves(config_of: ConfigOf) -> None:
    given = ("--kv-transfer-config", '{"kv_connector": "NixlConnector"}')
    config = config_of(engine="vllm", connector="cleave", engine_args=given)
    output = json.loads(option(build_engine_launch(config, BOOT, {}), "--kv-transfer-config"))
    assert output["kv_connector"] == "NixlConnector"
    assert "kv_connector_module_path" not in output
    assert "kv_connector_extra_config" not in output


def test_engines_ask_for_the_key_of_their_start_and_do_not_see_the_agents_token(
    config_of: ConfigOf,
) -> None:
    boot = replace(BOOT, engine_key="secret")
    hidden = {TOKEN_ENV: "/token", CALLERS_ENV: "x", PEERS_ENV: "x"}
    inherited = {**hidden, "CLEAVE_ENGINE_KEY": "old", "A": "b"}
    own = ("--middleware", "mine.Middleware")
    launch = build_engine_launch(config_of(engine="vllm", engine_args=own), boot, inherited)
    assert launch.env.items() >= {
        "CLEAVE_ENGINE_KEY": "secret", "A": "b"
    }.items()  # fmt: skip
    assert not launch.env.keys() & hidden.keys()
    middlewares = [launch.argv[n + 1] for n, e in enumerate(launch.argv) if e == "--middleware"]
    assert middlewares == [MIDDLEWARE, "mine.Middleware"]
    assert "secret" not in f"{launch.argv}{boot}"


def test_engines_of_agents_without_a_token_ask_for_no_key(config_of: ConfigOf) -> None:
    launch = build_engine_launch(config_of(engine="vllm"), BOOT, {"CLEAVE_ENGINE_KEY": "old"})
    assert launch.env["CLEAVE_ENGINE_KEY"] == ""
    assert "--middleware" not in launch.argv


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(("--api-key", "x"), {}), (("--api-key=x",), {}), ((), {"VLLM_API_KEY": "x"})],
)
def test_a_key_of_ones_own_for_vllm_is_refused(config_of: ConfigOf, arguments, env) -> None:
    with pytest.raises(LaunchError, match="remove --api-key and VLLM_API_KEY") as refused:
        build_engine_launch(config_of(engine="vllm", engine_args=arguments), BOOT, env)
    assert "x" not in str(refused.value).split()


@pytest.mark.parametrize(
    ("arguments", "env", "name"),
    [
        (("--config", "/f.yaml"), {}, "--config"),
        (("--config=/f.yaml",), {}, "--config"),
        ((), {"VLLM_MODEL_REDIRECT_PATH": "/f.json"}, "VLLM_MODEL_REDIRECT_PATH"),
    ],
)
def test_a_file_that_would_change_what_is_loaded_is_refused(
    config_of: ConfigOf, arguments: tuple[str, ...], env: dict[str, str], name: str
) -> None:
    config = config_of(engine="vllm", engine_args=arguments)
    for build in (build_engine_launch, build_headless_launch):
        with pytest.raises(LaunchError, match=f"remove {name}: "):
            build(config, BOOT, env)


def test_a_data_parallel_rank_has_the_engine_id_that_vllm_makes_of_it(config_of: ConfigOf) -> None:
    sizes = {"data_parallel_size": 4, "data_parallel_rank": 3, "expert_parallel": True}
    config = config_of(engine="vllm", host="10.0.0.7", **sizes)
    boot_id = create_boot_id(config)
    assert boot_id.endswith("_dp3")
    boot = replace(BOOT, boot_id=boot_id, meeting_point=MeetingPoint("10.0.0.1", 7000))
    launch = build_engine_launch(config, boot, {})
    settings = json.loads(option(launch, "--kv-transfer-config"))
    # vLLM appends the rank to it, and to the port of the side channel it adds the rank.
    assert f"{settings['engine_id']}_dp3" == boot_id
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5598"
    assert option(launch, "--data-parallel-size") == "4"
    assert option(launch, "--data-parallel-rank") == "3"
    assert option(launch, "--data-parallel-address") == "10.0.0.1"
    assert option(launch, "--data-parallel-rpc-port") == "7000"
    assert "--enable-expert-parallel" in launch.argv


def test_an_emulated_engine_does_not_know_its_rank(config_of: ConfigOf) -> None:
    config = config_of(engine="emulated", data_parallel_size=2, data_parallel_rank=1)
    launch = build_engine_launch(config, replace(BOOT, boot_id=create_boot_id(config)), {})
    assert "_" not in json.loads(option(launch, "--kv-transfer-config"))["engine_id"]
    assert launch.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert "--data-parallel-size" not in launch.argv


def test_an_engine_that_is_no_rank_gets_no_flags_of_one(config_of: ConfigOf) -> None:
    config = config_of(engine="vllm")
    assert "_" not in create_boot_id(config)
    arguments = build_engine_launch(config, BOOT, {}).argv
    assert not [each for each in arguments if "data-parallel" in each or "expert" in each]


@pytest.mark.parametrize(
    ("arguments", "value"), [((), None), (("--enable-lora",), "1"), (("--enable_lora",), "1")]
)
def test_adapters_can_be_loaded_where_the_engine_can_have_them(
    config_of: ConfigOf, arguments: tuple[str, ...], value: str | None
) -> None:
    launch = build_engine_launch(config_of(engine="vllm", engine_args=arguments), BOOT, {})
    assert launch.env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == value


@pytest.mark.parametrize(
    ("arguments", "gpu", "added"),
    [
        ((), False, ()),
        (("--enable-lora",), True, ()),
        (("--enable-lora",), False, ("--max-loras", "3")),
        (("--enable-lora", "--max-loras", "4"), False, ("--max-loras", "9")),
        (
            ("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "4"),
            False,
            ("--max-loras", "9", "--max-cpu-loras", "9"),
        ),
    ],
)
def test_a_slot_for_adapters_stays_empty_on_cpu(
    config_of: ConfigOf, arguments: tuple[str, ...], gpu: bool, added: tuple[str, ...]
) -> None:
    config = config_of(engine="vllm", engine_args=arguments)
    argv = build_engine_launch(config, replace(BOOT, gpu=gpu), {}).argv
    expected = arguments + added
    assert argv[len(argv) - len(expected) :] == expected
    assert argv.count("--max-loras") == expected.count("--max-loras")
