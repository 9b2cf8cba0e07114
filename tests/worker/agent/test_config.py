"""The agent's command line."""

import pytest

from cleave.manifests.credentials import add_credentials, name_accounts
from cleave.manifests.labels import Manifest
from cleave.policy.adapters import ENV, AdapterSource
from cleave.rpc.v1 import agent_pb2
from cleave_worker.agent.config import parse

PREFIX = "system:serviceaccount:"
OPERATOR = f"{PREFIX}cleave-system:cleave-operator"
REQUIRED = ["--deployment", "d", "--role", "decode", "--model", "org/model"]


def test_everything_after_two_dashes_belongs_to_the_engine() -> None:
    config = parse([*REQUIRED, "--name", "w", "--host", "::1", "--", "--dtype", "float32"], {})
    assert config.engine_args == ("--dtype", "float32")
    assert config.role == agent_pb2.ROLE_DECODE
    assert config.served_model_name == "org/model"
    assert config.address == "[::1]:9000"


def test_the_environment_of_a_pod_gives_name_address_and_peers() -> None:
    env = {"POD_IP": "10.0.0.7", "CLEAVE_POD_NAME": "w-1", "CLEAVE_AGENTS": "dns:workers:9000"}
    config = parse(REQUIRED, env)
    assert (config.name, config.address, config.peers) == (
        "w-1", "10.0.0.7:9000", "dns:workers:9000",
    )  # fmt: skip


def test_a_built_pod_lets_workers_only_ask_for_the_health() -> None:
    spec: Manifest = {"containers": [{"name": "worker"}]}
    accounts = name_accounts("team", "chat", "uid")
    (container,) = add_credentials(spec, "worker", accounts, OPERATOR)["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    gateways, workers = (f"{PREFIX}team:{name}" for name in accounts.names)
    config = parse([*REQUIRED, "--name", "w", "--host", "h"], env)
    assert config.trusted_accounts == (gateways, OPERATOR)
    assert config.peer_accounts == (workers,)


def test_a_cell_is_registered_only_when_one_is_given() -> None:
    own = [*REQUIRED, "--name", "w", "--host", "h"]
    assert parse(own, {}).cell == ""
    assert parse([*own, "--cell", "0"], {}).cell == "0"


@pytest.mark.parametrize(
    ("flags", "followed"),
    [
        ([], False),
        (["--transfer", "perlayer"], False),
        (["--connector", "cleave"], False),
        (["--connector", "cleave", "--transfer", "auto"], True),
        (["--connector", "cleave", "--transfer", "push", "--tensor-parallel-size", "2"], True),
    ],
)
def test_kv_can_be_followed_only_with_the_own_connector(flags: list[str], followed: bool) -> None:
    assert parse([*REQUIRED, "--name", "w", "--host", "h", *flags], {}).is_overlapped is followed


@pytest.mark.parametrize(
    "wrong",
    [
        ["--name", "w"],
        ["--host", "127.0.0.1"],
        ["--name", "w", "--host", "h", "--port", "70000"],
        ["--name", "w", "--host", "h", "--drain-timeout", "-1"],
        ["--name", "w", "--host", "h", "--tensor-parallel-size", "0"],
        ["--name", "w", "--host", "h", "--engine", "other"],
        ["--name", "w", "--host", "h", "--scheduling", '{"decode": {"order": "best"}}'],
    ],
)
def test_bad_usage_ends_with_exit_code_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*REQUIRED, *wrong], {})
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_worker_starts_with_the_adapters_of_its_environment() -> None:
    own = [*REQUIRED, "--name", "w", "--host", "h"]
    assert parse(own, {}).adapters == ()
    env = {ENV: '[{"name": "sql", "source": "/data/sql"}]'}
    assert parse(own, env).adapters == (AdapterSource("sql", "/data/sql"),)
    assert parse([*own, "--adapters", "[]"], env).adapters == ()


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"name": "a"}]', '[{"name": "a@", "source": "/a"}]']
)
def test_adapters_that_cannot_be_are_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*REQUIRED, "--name", "w", "--host", "h", "--adapters", text], {})
    assert "argument --adapters: adapter" in capsys.readouterr().err
