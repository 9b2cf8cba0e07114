"""The token that pods get for calls of agents."""

from cleave.manifests.credentials import add_credentials

OPERATOR = "system:serviceaccount:cleave-system:cleave-operator"
GATEWAYS = "system:serviceaccount:team:chat-discovery"
WORKERS = "system:serviceaccount:team:chat-workers"


def test_each_container_gets_a_token_for_agents_only_and_the_accounts_to_trust() -> None:
    spec = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]}
    before = repr(spec)
    built = add_credentials(spec, "chat", "team", OPERATOR)
    assert repr(spec) == before
    (volume,) = built["volumes"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "cleave.dev/agents"
    assert source["serviceAccountToken"]["expirationSeconds"] == 3600
    for container in built["containers"]:
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert mount["readOnly"]
        env = {each["name"]: each["value"] for each in container["env"]}
        assert env["CLEAVE_TOKEN_FILE"] == f"{mount['mountPath']}/token"
        # What an agent of the version before reads, which has one list for every method.
        assert env["CLEAVE_TRUSTED_ACCOUNTS"].split(",") == [GATEWAYS, OPERATOR, WORKERS]
        assert env["CLEAVE_CALLER_ACCOUNTS"].split(",") == [GATEWAYS, OPERATOR]
        assert env["CLEAVE_PEER_ACCOUNTS"] == WORKERS
    assert built["containers"][0]["env"][0] == {"name": "X", "value": "1"}
