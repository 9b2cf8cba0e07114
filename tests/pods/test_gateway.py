"""The gateway's pod, and the Services of a deployment."""

from cleave.pods.gateway import gateway_pod
from cleave.pods.service import gateway_service, workers_service
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


def test_the_gateway_finds_the_agents_through_the_workers_service(deployment) -> None:
    gateway = container(gateway_pod(deployment()))
    env = {var["name"]: var.get("value") for var in gateway["env"]}
    service = workers_service(deployment())["metadata"]
    assert env["CLEAVE_AGENTS"] == f"dns:{service['name']}.{service['namespace']}.svc:9000"


def test_the_gateway_is_confined_like_workers_are(deployment, pool) -> None:
    gateway, worker = gateway_pod(deployment()), worker_pod(pool(), 0)
    assert gateway["spec"]["securityContext"] == worker["spec"]["securityContext"]
    assert container(gateway)["securityContext"] == container(worker)["securityContext"]


def test_the_workers_service_shows_workers_that_are_not_ready(deployment, pool) -> None:
    service = workers_service(deployment())
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert (
        service["spec"]["selector"].items() <= worker_pod(pool(), 0)["metadata"]["labels"].items()
    )


def test_clients_use_a_service_of_the_deployments_name(deployment) -> None:
    service, pod = gateway_service(deployment()), gateway_pod(deployment())
    assert service["metadata"]["name"] == "chat"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, container(pod)["ports"][0]["name"])


def test_the_two_services_select_different_pods(deployment) -> None:
    assert (
        gateway_service(deployment())["spec"]["selector"]
        != workers_service(deployment())["spec"]["selector"]
    )
