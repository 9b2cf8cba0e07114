"""etcd, API server, controller manager and scheduler as processes of this machine.

Everything is as in a cluster that is meant to last (RBAC, admission, service accounts, garbage
collection), but for times: a node counts as lost after seconds instead of minutes. Started and
stopped by the fixture `cluster`; all parts end with the process that started them.
"""

import base64
import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import yaml
from cryptography.hazmat.primitives import serialization

from e2e.cluster.certificates import Authority, Pair, new_key, private_pem
from tests.support.ports import find_free_port

SERVICE_NETWORK = "10.78.0.0/16"
KUBERNETES_ADDRESS = "10.78.0.1"
"""Of the Service `kubernetes`, always the first of the network."""
API_SERVER_PORT = 6443
"""Where real nodes find it: the one that the chart's network policies name."""
NODE_LOST_S = 20
"""After so long without a sign of life a node counts as lost: longer than tests keep the API server
away."""
EVICTION_S = 3
"""Pods are deleted from a lost node after this."""
LOOPBACK = "127.0.0.1"

_ISSUER = "https://kubernetes.default.svc"
_START_TIMEOUT_S = 90
TIED = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # SIGKILL when the parent dies
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""For `python -c`, with this process's id and a command line: that ends with this process."""
_COLLECT_SELDOM = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}
"""Environment of programs in Go, a quarter of whose time went to garbage collection."""
_ADMIN = ("admin", ("system:masters",))
_FRONT_PROXY = "front-proxy"


class ControlPlane:
    """One control plane, with its data and logs below `folder`; a context manager.

    With an `address` that is not LOOPBACK it serves real nodes: it calls their kubelets, and pods
    reach it by the Service `kubernetes`.
    """

    def __init__(self, tools: Path, folder: Path, address: str = LOOPBACK) -> None:
        self._tools = tools
        self._folder = folder
        self._authority = Authority()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_url = f"http://127.0.0.1:{find_free_port()}"
        self._port = find_free_port() if address == LOOPBACK else API_SERVER_PORT
        self._address = address
        self.url = f"https://{address}:{self._port}"
        self.pki = folder / "pki"
        self.logs = folder / "logs"
        for part in ("logs", "pki", "kubeconfig"):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        try:
            self._write_pki()
            self._start_etcd()
            self.start_api_server()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all parts at once: nothing of theirs is kept."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def kubeconfig(self, user: str = _ADMIN[0], groups: Sequence[str] = _ADMIN[1]) -> Path:
        """A kubeconfig file for `user`, who may be anybody; an administrator by default."""
        path = self._folder / "kubeconfig" / user.replace(":", "_")
        if not path.exists():
            config = _kubeconfig(self.url, self._authority, self._authority.user(user, groups))
            path.write_text(yaml.safe_dump(config))
        return path

    def register_node(self, name: str, address: str) -> Path:
        """A kubeconfig file for a kubelet; its certificate and key are in `pki` by its name."""
        pair = self._authority.server([address, name])
        (self.pki / f"{name}.crt").write_bytes(pair.certificate)
        (self.pki / f"{name}.key").write_bytes(pair.key)
        return self.kubeconfig(f"system:node:{name}", ["system:nodes"])

    def service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig file with the rights of a service account."""
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
        return self.kubeconfig(f"system:serviceaccount:{namespace}:{name}", groups)

    def start_api_server(self) -> None:
        """Start the API server, wait until it is ready, and start what works on its objects.

        Controllers that were there before would wait for half a minute before they look again.
        """
        pki = self._folder / "pki"
        self._start(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--bind-address={self._address}",
            f"--advertise-address={self._address}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={pki / 'server.crt'}",
            f"--tls-private-key-file={pki / 'server.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            "--authorization-mode=Node,RBAC",
            f"--service-account-issuer={_ISSUER}",
            f"--service-account-key-file={pki / 'accounts.pub'}",
            f"--service-account-signing-key-file={pki / 'accounts.key'}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--allow-privileged=true",
            # There is no network but this one: webhooks are called at their pods' addresses.
            "--enable-aggregator-routing=true",
            # Aggregated API servers learn from it who asks.
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
            f"--requestheader-client-ca-file={pki / 'ca.crt'}",
            f"--requestheader-allowed-names={_FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            *self._node_flags(),
            f"--default-not-ready-toleration-seconds={EVICTION_S}",
            f"--default-unreachable-toleration-seconds={EVICTION_S}",
        )
        self._until_ready("kube-apiserver", self._api_server_ready)
        self._start_controller_manager()
        self._start_scheduler()

    def _node_flags(self) -> list[str]:
        if self._address == LOOPBACK:
            return ["--endpoint-reconciler-type=none"]
        return [
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-certificate-authority={self.pki / 'ca.crt'}",
            f"--kubelet-client-certificate={self.pki / 'admin.crt'}",
            f"--kubelet-client-key={self.pki / 'admin.key'}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def process(self, part: str) -> psutil.Process:
        """A part, for a test that freezes it."""
        return psutil.Process(self._processes[part].pid)

    def kill_api_server(self) -> None:
        """SIGKILL it, and the controllers with it; `start_api_server` brings them back."""
        for part in ("kube-scheduler", "kube-controller-manager", "kube-apiserver"):
            process = self._processes.pop(part)
            process.kill()
            process.wait()

    def signal_api_server(self, number: signal.Signals) -> None:
        """Send the API server a signal, such as SIGSTOP."""
        self._processes["kube-apiserver"].send_signal(number)

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{find_free_port()}"
        self._start(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self._until_ready("etcd", lambda: _answers(f"{self._etcd_url}/readyz"))

    def _start_controller_manager(self) -> None:
        pki = self._folder / "pki"
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('system:kube-controller-manager', ['system:masters'])}",
            "--secure-port=0",
            "--leader-elect=false",
            f"--root-ca-file={pki / 'ca.crt'}",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={NODE_LOST_S}s",
            "--kube-api-qps=400",
            "--kube-api-burst=800",
        )

    def _start_scheduler(self) -> None:
        self._start(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig('system:kube-scheduler', [])}",
            "--secure-port=0",
            "--leader-elect=false",
            "--kube-api-qps=400",
            "--kube-api-burst=800",
        )

    def _start(self, program: str, *flags: str) -> None:
        log = (self._folder / "logs" / f"{program}.log").open("ab")
        tied = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid())]
        with log:
            self._processes[program] = subprocess.Popen(
                [*tied, str(self._tools / program), *flags],
                env=os.environ | _COLLECT_SELDOM,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until_ready(self, program: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            log = self._folder / "logs" / f"{program}.log"
            ended = self._processes[program].poll()
            if ended is not None or time.monotonic() > end:
                why = "does not answer" if ended is None else f"ended with {ended}"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"{program} {why}:\n{tail}")
            time.sleep(0.05)

    def _api_server_ready(self) -> bool:
        pki = self._folder / "pki"
        trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        trust.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return _answers(f"{self.url}/readyz", trust)

    def _write_pki(self) -> None:
        accounts = new_key()
        public = accounts.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        server = self._authority.server([self._address, KUBERNETES_ADDRESS, *names])
        admin, front_proxy = self._authority.user(*_ADMIN), self._authority.user(_FRONT_PROXY)
        for name, content in {
            "ca.crt": self._authority.certificate,
            "server.crt": server.certificate,
            "server.key": server.key,
            "admin.crt": admin.certificate,
            "admin.key": admin.key,
            "front-proxy.crt": front_proxy.certificate,
            "front-proxy.key": front_proxy.key,
            "accounts.pub": public,
            "accounts.key": private_pem(accounts),
        }.items():
            (self._folder / "pki" / name).write_bytes(content)


def _answers(url: str, trust: ssl.SSLContext | None = None) -> bool:
    with (
        contextlib.suppress(urllib.error.URLError, TimeoutError, ConnectionError),
        urllib.request.urlopen(url, timeout=2, context=trust) as answer,
    ):
        return bool(answer.status == 200)
    return False


def _kubeconfig(url: str, authority: Authority, user: Pair) -> dict[str, object]:
    def encoded(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    server = {"server": url, "certificate-authority-data": encoded(authority.certificate)}
    credentials = {
        "client-certificate-data": encoded(user.certificate),
        "client-key-data": encoded(user.key),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "user", "user": credentials}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
    }
