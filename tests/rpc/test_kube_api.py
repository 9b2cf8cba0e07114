"""How the API server is found, and by which credentials."""

import base64
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import yaml

from cleave.rpc.kube_api import AccessError, find_access, read_kubeconfig


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("authority")
    certificate, key = folder / "ca.crt", folder / "ca.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=ca"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def write(folder: Path, cluster: dict, user: dict) -> Path:
    path = folder / "config"
    config = {
        "current-context": "here",
        "contexts": [
            {"name": "other", "context": {"cluster": "x", "user": "x"}},
            {"name": "here", "context": {"cluster": "c", "user": "u"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_pod_uses_its_service_account(tmp_path, authority) -> None:
    (tmp_path / "token").write_text("abc\n")
    shutil.copy(authority[0], tmp_path / "ca.crt")
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = find_access(env, tmp_path)
    assert (access.url, access.token) == ("https://[fd00::1]:6443", "abc")
    assert access.tls is not None
    assert access.tls.verify_mode is ssl.CERT_REQUIRED
    (tmp_path / "token").write_text("renewed")
    assert find_access(env, tmp_path).token == "renewed"


def test_a_kubeconfig_comes_before_the_service_account(tmp_path) -> None:
    path = write(tmp_path, {"server": "http://127.0.0.1:8001/"}, {"token": "t"})
    env = {"KUBECONFIG": f"{path}:/elsewhere", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    access = find_access(env, tmp_path)
    assert (access.url, access.token, access.tls) == ("http://127.0.0.1:8001", "t", None)


def test_credentials_may_be_files_beside_the_kubeconfig_or_within(tmp_path, authority) -> None:
    certificate, key = authority
    (tmp_path / "token").write_text("from a file")
    shutil.copy(certificate, tmp_path / "ca.crt")
    user = {
        "tokenFile": "token",
        "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
        "client-key": str(key),
    }
    cluster = {
        "server": "https://api.example:6443",
        "certificate-authority": "ca.crt",
        "tls-server-name": "kubernetes",
    }
    access = read_kubeconfig(write(tmp_path, cluster, user))
    assert (access.token, access.server_name) == ("from a file", "kubernetes")
    assert access.tls is not None
    assert len(access.tls.get_ca_certs()) == 1


def test_verification_is_skipped_only_where_the_kubeconfig_says_so(tmp_path) -> None:
    cluster = {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}
    access = read_kubeconfig(write(tmp_path, cluster, {}))
    assert access.tls is not None
    assert access.tls.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "set KUBECONFIG"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "automountServiceAccountToken"),
        ({"KUBECONFIG": "/nonexistent"}, "/nonexistent: No such file"),
    ],
)
def test_without_access_the_remedy_is_named(tmp_path, env: dict[str, str], said: str) -> None:
    with pytest.raises(AccessError, match=said):
        find_access(env, tmp_path)


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({}, {}, "server"),
        ({"server": "http://x"}, {"exec": {}}, "use a token"),
        ({"server": "http://x"}, {"tokenFile": "none"}, "none: No such file"),
        ({"server": "https://x", "certificate-authority-data": "?"}, {}, "not base64"),
    ],
)
def test_an_unusable_kubeconfig_is_reported_in_a_line(
    tmp_path, cluster: dict, user: dict, said: str
) -> None:
    with pytest.raises(AccessError, match=said):
        read_kubeconfig(write(tmp_path, cluster, user))


@pytest.mark.parametrize("text", ["", "[]", "a: [", "contexts: []\ncurrent-context: x"])
def test_a_file_that_is_no_kubeconfig_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(AccessError, match="config: "):
        read_kubeconfig(tmp_path / "config")
