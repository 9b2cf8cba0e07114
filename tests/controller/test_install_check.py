"""What `helm test` says of an API server that a thread plays."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cleave.api.manifest import validate
from cleave.controller import install_check
from cleave.controller.install_check import run_checks
from cleave.controller.webhook.validation import check_deployment
from cleave.rpc.kube_api import ApiServerAccess

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
LEASE = "/apis/coordination.k8s.io/v1/namespaces/cleave-system/leases/cleave-operator"
CREATE = "/apis/cleave.dev/v1alpha1/namespaces/default/llmdeployments?dryRun=All"
REFUSED = "denied the request: 40 attention heads cannot be shared by 7 GPUs"


class FakeApiServer(HTTPServer):
    """Answers GET of the Lease with `lease`, and creations with `statuses`, one after the other."""

    lease: tuple[int, dict]
    answers: list[tuple[int, dict]]


class _Handler(BaseHTTPRequestHandler):
    server: FakeApiServer

    def do_GET(self) -> None:
        assert self.path == LEASE
        self._answer(*self.server.lease)

    def do_POST(self) -> None:
        assert self.path == CREATE, "nothing may be created"
        assert self.headers["authorization"] == "Bearer secret"
        manifest = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert manifest["kind"] == "LLMDeployment"
        self._answer(*self.server.answers.pop(0))

    def _answer(self, status: int, body: dict) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def build_lease(age_s: float = 3.0, holder: str = "cleave-operator-1_ab") -> tuple[int, dict]:
    renewed = (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}
    return 200, {"spec": spec}


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer(("127.0.0.1", 0), _Handler) as fake:
        fake.lease = build_lease()
        fake.answers = [(201, {}), (403, {"message": REFUSED})]
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def check(server: FakeApiServer, *, has_webhook: bool = True) -> list[tuple[bool, str]]:
    access = ApiServerAccess(f"http://127.0.0.1:{server.server_port}", "secret")
    lease = "cleave-system/cleave-operator"
    return list(run_checks(access, lease, "default", has_webhook=has_webhook, now=NOW))


def test_all_checks_hold_where_an_operator_leads_and_the_webhook_is_called(server) -> None:
    assert [holds for holds, _ in check(server)] == [True] * 3


def test_without_the_webhook_it_is_not_checked(server) -> None:
    assert [holds for holds, _ in check(server, has_webhook=False)] == [True] * 2


@pytest.mark.parametrize(
    ("lease", "said"),
    [
        (build_lease(age_s=60), "renewed the Lease cleave-system/cleave-operator 60 s ago"),
        (build_lease(holder=""), "no operator holds the Lease"),
        ((404, {"message": "not found"}), "cannot be read: not found (status 404)"),
    ],
)
def test_an_operator_that_does_not_lead_is_a_fault(server, lease, said: str) -> None:
    server.lease = lease
    (holds, sentence), *others = check(server)
    assert not holds
    assert said in sentence
    assert all(holds for holds, _ in others), "the other checks are made all the same"


@pytest.mark.parametrize(
    ("answers", "faults"),
    [
        (
            [(404, {"message": "no such resource"}), (403, {"message": REFUSED})],
            {1: "is refused: no"},
        ),
        ([(201, {}), (201, {})], {2: "does not reach the operator's port 9443"}),
        ([(201, {}), (500, {"message": "failed calling webhook"})], {2: "failed calling webhook"}),
    ],
)
def test_wrong_admission_is_a_fault(server, answers, faults: dict[int, str]) -> None:
    server.answers = answers
    results = check(server)
    assert {number for number, (holds, _) in enumerate(results) if not holds} == faults.keys()
    for number, said in faults.items():
        assert said in results[number][1]


def test_an_api_server_that_does_not_answer_is_a_fault_of_each_check() -> None:
    access = ApiServerAccess("http://127.0.0.1:9", "")
    results = list(run_checks(access, "a/b", "default", has_webhook=True, now=NOW))
    assert all(not holds and "does not answer" in sentence for holds, sentence in results)


def test_what_it_creates_is_valid_but_for_what_the_webhook_alone_knows() -> None:
    def build(spec: dict):
        head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "LLMDeployment"}
        return validate(head | {"metadata": {"name": "install-check"}, "spec": spec})

    assert not check_deployment(build(install_check._VALID), None).faults
    (fault,) = check_deployment(build(install_check._FOR_WEBHOOK), None).faults
    assert install_check._REFUSAL in fault


def test_without_access_it_says_what_is_missing(monkeypatch, capsys) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert install_check.main(["--lease", "a/b", "--namespace", "c"]) == 2
    assert "KUBECONFIG" in capsys.readouterr().err
