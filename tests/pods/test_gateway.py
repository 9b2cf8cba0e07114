"""The gateway's pod."""

from cleave.pods.gateway import gateway_pod
from cleave.pods.worker import worker_pod


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def test_the_command_line_is_the_gateways(deployment) -> None:
    chat = deployment(routing={"fallback": "OnPrefillLoss", "queueLimit": 7})
    assert container(gateway_pod(chat))["command"] == [
        *("python", "-m", "cleave.gateway.main", "--host", "$(POD_IP)", "--port", "8080"),
        *("--agents", "$(CLEAVE_AGENTS)", "--fallback", "OnPrefillLoss", "--queue-limit", "7"),
    ]


def test_the_gateway_takes_the_address_it_is_told(deployment) -> None:
    gateway = container(gateway_pod(deployment(), host="127.0.0.1", port=9999))
    assert gateway["command"][3:7] == ["--host", "127.0.0.1", "--port", "9999"]
    assert gateway["ports"] == [{"name": "http", "containerPort": 9999}]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9999}


def test_the_gateway_finds_the_agents_where_workers_look_for_peers(deployment, pool) -> None:
    sources = [
        {var["name"]: var.get("value") for var in container(pod)["env"]}["CLEAVE_AGENTS"]
        for pod in (gateway_pod(deployment()), worker_pod(pool(), 0))
    ]
    assert sources == ["dns:chat-workers.llm.svc:9000"] * 2


def test_the_gateway_is_confined_like_workers_are(deployment, pool) -> None:
    gateway, worker = gateway_pod(deployment()), worker_pod(pool(), 0)
    assert gateway["spec"]["securityContext"] == worker["spec"]["securityContext"]
    assert container(gateway)["securityContext"] == container(worker)["securityContext"]
