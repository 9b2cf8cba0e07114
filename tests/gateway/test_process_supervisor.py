"""The parent of a gateway's processes, with processes that do what the test wants.

Each runs in a Python of its own: it forks, which a test process with threads had better not do.
"""

import socket
import subprocess
import sys
import textwrap

import pytest

from cleave.gateway.main import main
from cleave.gateway.process_supervisor import reserve_port

PROGRAM = """
import os, signal, sys, time
from cleave.gateway import process_supervisor
from cleave.gateway.config import GatewayConfig, Timeouts

process_supervisor.POLL_INTERVAL_S = 0.02
process_supervisor.MIN_RESTART_DELAY_S = process_supervisor.MAX_RESTART_DELAY_S = 0.02
process_supervisor.SHUTDOWN_MARGIN_S = 0.2

def live(shared_state):
    shared_state.register_process(os.getpid())
    while True:
        shared_state.publish_heartbeat(time.monotonic(), 0, 0)
        time.sleep(0.01)

def end_parent():
    os.kill(os.getppid(), signal.SIGTERM)

{serve}

config = GatewayConfig("", port=0, processes=2, timeouts=Timeouts(drain_s=0.0))
sys.exit(process_supervisor.run_processes(config, serve))
"""


def run(serve: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(serve=textwrap.dedent(serve))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_all_end_with_the_parent_on_sigterm() -> None:
    done = run(
        """
        def serve(config, shared_state):
            def tell(*_):
                os.write(1, b"told %d\\n" % shared_state.process_index)
                os._exit(0)
            signal.signal(signal.SIGTERM, tell)
            shared_state.register_process(os.getpid())
            while shared_state.process_index == 0 and len(shared_state.list_pids()) < 2:
                time.sleep(0.01)
            if shared_state.process_index == 0:
                end_parent()
            signal.pause()
        """
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["told 0", "told 1"]


def test_who_does_not_end_is_killed() -> None:
    done = run(
        """
        def serve(config, shared_state):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if shared_state.process_index == 1:
                end_parent()
            live(shared_state)
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_killed_is_replaced_and_its_share_of_the_books_cleared() -> None:
    done = run(
        """
        def serve(config, shared_state):
            table = shared_state.tenant_usage
            row = table.claim(b"tenant")
            if shared_state.restarts:
                print(table.read(row, 0), shared_state.restarts)
                end_parent()
            table.cells[table.locate_own(row, 0)] = 5.0
            shared_state.register_process(os.getpid())
            if shared_state.process_index == 1:
                while len(shared_state.list_pids()) < 2 or table.read(row, 0) != (5.0, 5.0):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            live(shared_state)
        """
    )
    assert (done.returncode, done.stdout) == (0, "(5.0, 0.0) 1\n"), done.stderr
    assert "process 2 was killed by signal 9" in done.stderr


def test_a_parent_that_is_stopped_and_continued_goes_on() -> None:
    """As by a debugger, or by `kill -STOP`: in the middle of its waits, and beyond their ends."""
    done = run(
        """
        def serve(config, shared_state):
            if shared_state.process_index == 1:
                live(shared_state)
            shared_state.register_process(os.getpid())
            for _ in range(20):
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(0.05)
                os.kill(os.getppid(), signal.SIGCONT)
                time.sleep(0.01)
            os.write(1, b"still there\\n")
            end_parent()
            live(shared_state)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "still there\n"


def test_a_process_that_hangs_is_killed_and_replaced() -> None:
    done = run(
        """
        process_supervisor.HUNG_TIMEOUT_S = 0.3
        def serve(config, shared_state):
            if shared_state.process_index == 0:
                live(shared_state)
            if shared_state.restarts:
                end_parent()
            shared_state.register_process(os.getpid())
            signal.pause()
        """
    )
    assert done.returncode == 0, done.stderr
    assert "killing it" in done.stderr


def test_a_gateway_whose_processes_keep_dying_ends() -> None:
    done = run(
        """
        def serve(config, shared_state):
            shared_state.register_process(os.getpid())
            while not shared_state.restarts and len(shared_state.list_pids()) < 2:
                time.sleep(0.01)
            time.sleep(0.1)
            return 3
        """
    )
    assert done.returncode == 1
    assert "giving up" in done.stderr


@pytest.mark.parametrize("code", [1, 2])
def test_what_one_cannot_do_at_the_start_no_other_can(code: int) -> None:
    done = run(
        f"""
        def serve(config, shared_state):
            return {code} if shared_state.process_index else live(shared_state)
        """
    )
    assert done.returncode == code


def test_only_one_process_gives_out_tickets() -> None:
    done = run(
        """
        config = None
        def serve(config, shared_state):
            os.write(1, b"%d\\n" % config.router_port)
            shared_state.register_process(os.getpid())
            if len(shared_state.list_pids()) == 2:
                end_parent()
            live(shared_state)
        GatewayConfig = __import__("functools").partial(GatewayConfig, router_port=9)
        """
    )
    assert sorted(done.stdout.splitlines()) == ["0", "9"], done.stderr


def test_a_port_that_another_gateway_serves_is_not_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            reserve_port("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    ("count", "fault"),
    [
        ("0", "--processes must be 1 to 64"),
        ("65", "--processes must be 1 to 64"),
        ("-1", "argument --processes: -1 is not a whole number"),
    ],
)
def test_a_senseless_number_of_processes_is_refused(count: str, fault: str, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--agents", "", "--processes", count])
    assert refused.value.code == 2
    assert fault in capsys.readouterr().err
