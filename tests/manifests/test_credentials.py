"""The accounts of pods, and what their processes need to call agents."""

from cleave.manifests.credentials import add_credentials, name_accounts

OPERATOR = "system:serviceaccount:cleave-system:cleave-operator"
ACCOUNTS = name_accounts("team", "chat", "3f0c")


def test_pods_run_as_the_account_of_their_component_and_name_whom_agents_trust() -> None:
    spec = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}
    before = repr(spec)
    for component, account in (("gateway", ACCOUNTS.gateways), ("worker", ACCOUNTS.workers)):
        built = add_credentials(spec, component, ACCOUNTS, OPERATOR)
        assert repr(spec) == before
        assert built["serviceAccountName"] == account
        for container in built["containers"]:
            env = {each["name"]: each["value"] for each in container["env"]}
            gateways, workers = (f"system:serviceaccount:team:{name}" for name in ACCOUNTS.names)
            assert env["CLEAVE_CALLER_ACCOUNTS"].split(",") == [gateways, OPERATOR]
            assert env["CLEAVE_PEER_ACCOUNTS"] == workers
        assert built["containers"][0]["env"][0] == {"name": "X", "value": "1"}
        # No token that several agents would accept.
        assert "volumes" not in built


def test_names_of_accounts_depend_on_what_is_not_known_before() -> None:
    assert name_accounts("team", "chat", "3f0c") == ACCOUNTS
    others = [
        name_accounts("team", "chat", "3f0d"), name_accounts("team", "chat"),
        name_accounts("other", "chat"), name_accounts("team", "chat-workers"),
    ]  # fmt: skip
    names = [name for each in (ACCOUNTS, *others) for name in each.names]
    assert len(set(names)) == len(names)
    assert ACCOUNTS.gateways.startswith("chat-gateways-")
    assert ACCOUNTS.workers.startswith("chat-workers-")
