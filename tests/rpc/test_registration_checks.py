"""What an agent may report about itself, and what it may not."""

import pytest

from cleave.rpc.registration_checks import RegistrationError, check_pairs, check_registration
from cleave.rpc.v1 import agent_pb2

AGENT = "10.0.0.1:9000"


def make_registration(**fields: object) -> agent_pb2.Registration:
    registration = agent_pb2.Registration(
        instance="p-0", deployment="chat", model="m", engine_url="http://10.0.0.1:9001"
    )
    registration.MergeFrom(agent_pb2.Registration(**fields))
    return registration


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"engine_url": "http://10.0.0.2:9001"}, "its engine is at 10.0.0.2"),
        ({"engine_url": "http://metadata.internal:80"}, "its engine is at metadata.internal"),
        ({"instance": "p-1"}, "instance 'p-1' is not of pod 'p-0'"),
        ({"instance": "p-01"}, "is not of pod"),
        ({"instance": "p.rank-1"}, "is not of pod"),
        ({"instance": "q.rank-1", "data_parallel_size": 2}, "is not of pod"),
        ({"deployment": "other"}, "deployment 'other', not 'chat'"),
        ({"adapters": [f"a{n}" for n in range(1_025)]}, "1025 adapters"),
        ({"adapters": ["a" * 513]}, "a name has 513 characters"),
        ({"runtime_adapters": [{"name": f"a{n}"} for n in range(1_025)]}, "1025 adapters"),
        ({"runtime_adapters": [{"engine_name": "a" * 513}]}, "a name has 513 characters"),
        ({"model": "m" * 513}, "a name has 513 characters"),
        ({"reason": "r" * (512 << 10)}, "is too large"),
        ({"boot_id": "b b"}, "'b b' has other characters"),
        ({"instance": "p-0.a\n"}, "has other characters"),
        ({"instance": "p-0.\u00e4"}, "has other characters"),
    ],
)
def test_a_registration_of_something_else_is_refused(fields: dict, fault: str) -> None:
    with pytest.raises(RegistrationError, match=fault):
        check_registration(make_registration(**fields), AGENT, "chat", "p-0")


@pytest.mark.parametrize("engine_url", ["http://10.0.0.9:9001", "http://other.example:9001"])
def test_an_agent_that_is_dialled_by_name_has_its_engine_there(engine_url: str) -> None:
    with pytest.raises(RegistrationError, match=r"the agent at worker\.example"):
        check_registration(make_registration(engine_url=engine_url), "worker.example:9000")


@pytest.mark.parametrize(
    ("proofs", "fault"),
    [
        ([{}] * 1_025, "results of 1025 pairs"),
        ([{"reason": "r" * 513}], "a name has 513 characters"),
        ([{"prefill_boot_id": "b" * 513}], "a name has 513 characters"),
    ],
)
def test_results_of_pairs_are_bounded(proofs: list[dict], fault: str) -> None:
    check_pairs(agent_pb2.PairProofs(proofs=[{"prefill": "p"}] * 1_024))
    with pytest.raises(RegistrationError, match=fault):
        check_pairs(agent_pb2.PairProofs(proofs=proofs))


@pytest.mark.parametrize(
    ("agent", "engine_url", "instance"),
    [
        (AGENT, "http://10.0.0.1:9001", "p-0"),
        (AGENT, "", "p-0"),
        (AGENT, "http://10.0.0.1:9001", "p-0.decode-1"),
        ("[fd00::1]:9000", "http://[fd00:0::1]:9001", "p-0"),
        ("worker.example:9000", "http://worker.example:9001", "p-0"),
        ("localhost:9000", "http://127.0.0.1:9001", "p-0"),
    ],
    ids=["usual", "starting", "cell", "IPv6", "name", "localhost"],
)
def test_an_agents_own_registration_passes(agent: str, engine_url: str, instance: str) -> None:
    registration = make_registration(instance=instance)
    registration.engine_url = engine_url
    check_registration(registration, agent, "chat", "p-0")
    check_registration(registration, agent)


@pytest.mark.parametrize(
    ("pod", "is_own"), [("p-a1b2c3-1", True), ("p-a1b2c3", True), ("p-a1b2c3-123456", False)]
)
def test_data_parallel_ranks_of_all_pods_have_the_name_of_the_first(pod: str, is_own: bool) -> None:
    registration = make_registration(instance="p-a1b2c3.rank-2", data_parallel_size=4)
    if is_own:
        check_registration(registration, AGENT, "chat", pod)
    else:
        with pytest.raises(RegistrationError, match="is not of pod"):
            check_registration(registration, AGENT, "chat", pod)
