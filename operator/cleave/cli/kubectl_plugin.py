"""`kubectl cleave`: the commands that concern a cluster, as a plug-in of kubectl.

kubectl runs the program `kubectl-cleave`, which the wheel installs, with the user's environment.
Two commands differ from those of `cleave`: `rollout` compares with what runs in the cluster, and
`top` forwards a port to the gateway. Both call kubectl, which has the user's contexts and ways to
log in; this process never reads a kubeconfig.
"""

import select
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, NoReturn

import typer
from typer import Argument, Option

from cleave.cli.main import CommandGroup, ManifestCommand, ManifestsCommand, run_app
from cleave.cli.manifests.render import render
from cleave.cli.manifests.rollout import MaxSurge, MaxUnavailable, show_rollout
from cleave.cli.manifests.validate import validate
from cleave.cli.options import File, TableFormat, TableOutput
from cleave.cli.output.errors import FAILED, fail, load_manifest
from cleave.cli.planning.inputs import ClusterFile
from cleave.cli.planning.plan import plan
from cleave.cli.planning.provision import provision
from cleave.cli.planning.simulate import simulate
from cleave.cli.profiling.profile import profile
from cleave.cli.profiling.workload import workload
from cleave.cli.top.command import Interval, LineOutput, Once
from cleave.cli.top.command import top as show_top

_TIMEOUT_S = 30.0
_RESOURCE = "llmdeployments.cleave.dev"

Namespace = Annotated[
    str | None, Option("--namespace", "-n", help="Default: that of the manifest or the context.")
]
Context = Annotated[str | None, Option(help="Context of the kubeconfig. Default: the current one.")]


def rollout(
    file: File,
    namespace: Namespace = None,
    context: Context = None,
    output: TableOutput = TableFormat.TABLE,
    cluster: ClusterFile = None,
    max_surge: MaxSurge = None,
    max_unavailable: MaxUnavailable = None,
) -> None:
    """Preview the steps in which the operator would roll out a manifest; changes nothing.

    The manifest is compared with the deployment of its name in the cluster. The columns are those
    of cleave rollout.

    Exit codes: 0 steps were printed, 1 there is no plan to roll out, or no such deployment in the
    cluster, 2 the input is invalid.

    \b
    Examples:
      # See what applying new.yaml would do
      kubectl cleave rollout -f new.yaml
    """
    after = load_manifest(file)
    metadata = after.metadata
    if namespace is None and "namespace" in metadata.model_fields_set:
        namespace = metadata.namespace
    call = _build_call(namespace, context, "get", _RESOURCE, after.name, "--output", "yaml")
    try:
        found = subprocess.run(
            call, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        _fail_without_response()
    if found.returncode:
        fail([_read_error(found.stderr)], FAILED)
    with tempfile.TemporaryDirectory(prefix="cleave-") as folder:
        before = Path(folder) / f"{after.name}.yaml"
        before.write_text(found.stdout)
        show_rollout(after, file, before, output, cluster, max_surge, max_unavailable)


def top(
    name: Annotated[str, Argument(help="Name of the deployment.")],
    namespace: Namespace = None,
    context: Context = None,
    interval: Interval = 1.0,
    once: Once = False,
    output: LineOutput = TableFormat.TABLE,
) -> None:
    """Show live traffic against its SLO and the load of each instance, until q or Ctrl-C.

    The figures are those of one of the deployment's gateways, to whose internal port kubectl
    forwards a port of this machine. The columns are those of cleave top.

    \b
    Examples:
      # Watch the deployment chat
      kubectl cleave top chat -n ai
    """
    from cleave.manifests.labels import INTERNAL_PORT, get_gateway_name

    target = f"deployment/{get_gateway_name(name)}"
    call = _build_call(namespace, context, "port-forward", target, f":{INTERNAL_PORT}")
    with _forward_port(call) as port:
        show_top(name, f"http://127.0.0.1:{port}", interval, once, output)


def _build_call(namespace: str | None, context: str | None, *words: str) -> list[str]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        fail(["kubectl is not on PATH"], FAILED)
    selected = [("--context", context), ("--namespace", namespace)]
    return [kubectl, *(word for flag, value in selected if value for word in (flag, value)), *words]


@contextmanager
def _forward_port(call: Sequence[str]) -> Iterator[int]:
    """Run `kubectl port-forward`; yields the local port. Exits with code 1 when it fails."""
    with subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as forwarding:
        try:
            if forwarding.stdout is None or forwarding.stderr is None:
                raise RuntimeError("pipes: are missing")
            if not select.select([forwarding.stdout], [], [], _TIMEOUT_S)[0]:
                _fail_without_response()
            # "Forwarding from 127.0.0.1:43211 -> 8081"
            address, arrow, _ = forwarding.stdout.readline().partition(" -> ")
            if not arrow:
                fail([_read_error(forwarding.stderr.read())], FAILED)
            for stream in (forwarding.stdout, forwarding.stderr):
                # It writes a line per connection, and would stop when the pipe is full.
                threading.Thread(target=_discard, args=(stream,), daemon=True).start()
            yield int(address.rpartition(":")[2])
        finally:
            forwarding.kill()


def _discard(lines: IO[str]) -> None:
    """Read to the end and keep nothing."""
    deque(lines, maxlen=0)


def _read_error(text: str) -> str:
    """The last line, with which kubectl says what was wrong."""
    lines = text.strip().splitlines()
    return f"kubectl: {lines[-1].removeprefix('error: ')}" if lines else "kubectl: has failed"


def _fail_without_response() -> NoReturn:
    fail([f"kubectl: no response for {_TIMEOUT_S:.0f} s; is the cluster reachable?"], FAILED)


app = typer.Typer(
    name="kubectl cleave",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan, check and watch LLMDeployments. kubectl describe llmd NAME shows their status; the"
    " program cleave has more commands.",
)
for reading_one in (plan, simulate, provision, render, rollout):
    app.command(cls=ManifestCommand)(reading_one)
app.command(cls=ManifestsCommand)(validate)
for command in (workload, profile, top):
    app.command()(command)


def main() -> None:
    """Run the plug-in."""
    run_app(app, "kubectl cleave")
