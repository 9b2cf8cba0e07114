"""A cluster as tests use it: the programs of its users, and its nodes where they are ours.

Made by `opened`: a control plane and nodes of its own, or the cluster of KUBECONFIG.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import yaml
from kubernetes.client import ApiClient, ApiException
from kubernetes.config import new_client_from_config
from urllib3.exceptions import HTTPError

from cleave.controller.cluster.client import KINDS, ApiResource

from e2e.cluster import tools
from e2e.cluster.client import Manifest
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.nodes import Nodes, Shape
from e2e.cluster.services import endpoints
from e2e.real_nodes.real_cluster import open_real_cluster
from e2e.real_nodes.sandbox import FOLDER_VARIABLE
from e2e.support.deployments import compute_pause_s

CRDS = tools.REPOSITORY / "crds"
WITHOUT_GUARD = ("--wait", "--ignore-not-found", "--no-hooks")
"""Flags of `helm uninstall` after tests: a failed one may leave deployments."""
_COMMAND_TIMEOUT_S = 120
T = TypeVar("T")

RESOURCES = {
    "llmd": KINDS["LLMDeployment"],
    "ipool": KINDS["InstancePool"],
    "pods": KINDS["Pod"],
    "nodes": KINDS["Node"],
    "service": KINDS["Service"],
    "serviceaccount": KINDS["ServiceAccount"],
    "role": KINDS["Role"],
    "rolebinding": KINDS["RoleBinding"],
    "networkpolicy": KINDS["NetworkPolicy"],
    "secret": KINDS["Secret"],
    "configmap": KINDS["ConfigMap"],
    "deployment": KINDS["Deployment"],
    "lease": KINDS["Lease"],
    "validatingwebhookconfiguration": KINDS["ValidatingWebhookConfiguration"],
    "endpointslices": ApiResource("discovery.k8s.io/v1", "endpointslices"),
    "hpa": ApiResource("autoscaling/v2", "horizontalpodautoscalers"),
    "crd": ApiResource("apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False),
}
"""What `Cluster.get` and `Cluster.list` read, by kubectl's names."""


class CommandError(AssertionError):
    """kubectl or helm ended with an error; the text is what it said."""

    def __init__(self, command: str, text: str) -> None:
        super().__init__(f"{command}:\n{text}")
        self.text = text


@dataclass(frozen=True)
class Cluster:
    """A cluster that answers."""

    programs: Path | None
    """Where kubectl and helm are; on PATH when absent."""
    kubeconfig: Path
    control_plane: ControlPlane | None = None
    """Absent when the cluster is not ours."""
    nodes: Nodes | None = None
    """Nodes that run pods as processes; absent when nodes are real or the cluster is not ours."""

    @property
    def has_service_addresses(self) -> bool:
        """Whether addresses of Services can be reached from here."""
        return self.control_plane is not None

    @contextmanager
    def lend_nodes(self, *shapes: Shape) -> Iterator[None]:
        """Process nodes while the block lasts; where nodes are real, those that there are."""
        if self.nodes is None:
            yield
            return
        self.nodes.add(*shapes)
        try:
            yield
        finally:
            for shape in shapes:
                self.nodes.lose(shape.name)
                self.kubectl("delete", "node", shape.name)

    @contextmanager
    def lend_namespace(self) -> Iterator[str]:
        """A namespace while the block lasts."""
        name = f"test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - the word of `subprocess.run`
        kubeconfig: Path | None = None,
        timeout_s: float = _COMMAND_TIMEOUT_S,
    ) -> str:
        """What kubectl prints, as an administrator or the user of `kubeconfig`.

        Raises CommandError with its error text when it fails.
        """
        return self._run("kubectl", args, input, kubeconfig, timeout_s)

    def helm(self, *args: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """What helm prints. Raises CommandError with its error text when it fails."""
        return self._run("helm", args, None, None, timeout_s)

    def apply(self, *manifests: Manifest, namespace: str = "default") -> str:
        """`kubectl apply` of manifests."""
        text = yaml.safe_dump_all(manifests)
        return self.kubectl("apply", "-n", namespace, "-f", "-", input=text)

    def get(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        """An object; None when there is none."""
        return self._read(RESOURCES[kind].build_path(namespace, name)) or None

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[Manifest]:
        """Objects of a kind, those with the labels of `selector`."""
        path = RESOURCES[kind].build_path(namespace)
        return list(self._read(f"{path}?labelSelector={quote(selector)}")["items"])

    def endpoint(self, service: str, namespace: str = "default", port: str = "") -> str | None:
        """HOST:PORT of a pod behind a Service that would get the next connection."""
        label = f"kubernetes.io/service-name={service}"
        found = endpoints(self.list("endpointslices", namespace, label), port)
        return f"{found[0][0]}:{found[0][1]}" if found else None

    @cached_property
    def _api(self) -> ApiClient:
        return new_client_from_config(str(self.kubeconfig))

    def _read(self, path: str) -> Manifest:
        """The object at `path`. Tests poll it: a kubectl takes 35 ms of a core for each answer."""
        headers: dict[str, str] = {"Accept": "application/json"}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        url = f"{self._api.configuration.host}{path}"
        try:
            answer = self._api.call_api("GET", url, headers, _request_timeout=_COMMAND_TIMEOUT_S)
            text = answer.read()
        except (ApiException, HTTPError, OSError) as error:
            raise CommandError(f"GET {path}", str(error)) from error
        if answer.status == HTTPStatus.NOT_FOUND:
            return {}
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise CommandError(f"GET {path}", text.decode(errors="replace"))
        return json.loads(text)  # type: ignore[no-any-return]

    def _run(
        self,
        program: str,
        args: Sequence[str],
        stdin: str | None,
        kubeconfig: Path | None,
        timeout_s: float,
    ) -> str:
        path = str(self.programs / program) if self.programs else program
        done = subprocess.run(
            [path, *args],
            env=os.environ | {"KUBECONFIG": str(kubeconfig or self.kubeconfig)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise CommandError(" ".join([program, *args]), done.stderr or done.stdout)
        return done.stdout


def has_addresses() -> bool:
    """Whether addresses of pods are local here, as inside `scripts/isolated`."""
    with socket.socket() as probe:
        try:
            probe.bind(("10.77.255.254", 0))
        except OSError:
            return False
    return True


@contextmanager
def opened(folder: Path) -> Iterator[Cluster]:
    """The cluster of KUBECONFIG, or one of our own, data and logs in `folder`.

    Inside `e2e.real_nodes.sandbox` it has real nodes, elsewhere none yet.
    """
    if theirs := os.environ.get("KUBECONFIG"):
        here = shutil.which("kubectl") and shutil.which("helm")
        yield Cluster(None if here else tools.folder(), Path(theirs))
        return
    programs = tools.folder()
    if FOLDER_VARIABLE in os.environ:
        with open_real_cluster(programs, folder) as control_plane:
            yield Cluster(programs, control_plane.kubeconfig(), control_plane)
        return
    with (
        ControlPlane(programs, folder) as control_plane,
        Nodes(control_plane.kubeconfig(), folder / "nodes") as nodes,
    ):
        yield Cluster(programs, control_plane.kubeconfig(), control_plane, nodes)


def wait_until(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """The first true answer of `condition`; fails with `what` when it does not come in time.

    Errors of kubectl count as "not yet": the API server may be away.
    """
    began, waited_s = time.monotonic(), 0.0
    last: Any = None
    while waited_s < timeout_s:
        try:
            if last := condition():
                return last
        except CommandError as error:
            last = error
        waited_s = time.monotonic() - began
        time.sleep(compute_pause_s(waited_s))
    raise AssertionError(f"{what}: not within {timeout_s:g} s; last: {last}")
