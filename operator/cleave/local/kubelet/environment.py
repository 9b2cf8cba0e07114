"""A container's environment and command line, resolved as Kubernetes resolves them.

Pure; called by the kubelet before each start. A variable may refer to those before it as
`$(NAME)`; an unknown reference stays as it is and `$$(NAME)` is a literal, as in Kubernetes.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from cleave.local.kubelet.pod_spec import PodError, PodSpec
from cleave.manifests.labels import Manifest

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_LABEL = re.compile(r"metadata\.labels\['([^']+)'\]")


def build_downward_api_fields(spec: PodSpec, pod_ip: str, host: str, node: str) -> dict[str, str]:
    """The fields of the downward API for this pod."""
    return {
        "metadata.name": spec.name,
        "metadata.namespace": spec.namespace,
        "status.podIP": pod_ip,
        "status.hostIP": host,
        "spec.nodeName": node,
        **{f"metadata.labels['{key}']": value for key, value in spec.labels.items()},
    }


def resolve_env(
    env: Iterable[Manifest], known_fields: Mapping[str, str], overrides: Mapping[str, str]
) -> dict[str, str]:
    """The container's variables; `overrides` win. Raises PodError for an unsupported source."""
    resolved: dict[str, str] = {}
    for variable in env:
        name = variable["name"]
        if (value := overrides.get(name)) is None:
            value = _resolve_value(variable, known_fields, resolved)
        resolved[name] = value
    return {**resolved, **overrides}


def build_command_line(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Command and arguments with references expanded; `python` becomes this interpreter."""
    argv = [expand(word, env) for word in command]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    return argv


def expand(text: str, env: Mapping[str, str]) -> str:
    """`text` with each `$(NAME)` of `env` replaced."""
    return _REFERENCE.sub(lambda ref: "$" if ref[0] == "$$" else env.get(ref[1], ref[0]), text)


def _resolve_value(variable: Manifest, known: Mapping[str, str], earlier: Mapping[str, str]) -> str:
    source = variable.get("valueFrom")
    if source is None:
        return expand(str(variable.get("value") or ""), earlier)
    path = (source.get("fieldRef") or {}).get("fieldPath")
    if path is None:
        raise PodError(f"env {variable['name']}: only value and fieldRef are supported")
    if _LABEL.fullmatch(path):
        return known.get(path, "")
    if path not in known:
        raise PodError(f"env {variable['name']}: unknown fieldPath {path!r}")
    return known[path]
