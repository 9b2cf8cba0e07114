"""`cleave-worker`: runs one engine and its agent; the container command of worker pods.

Exit codes: 0 drained; 2 bad usage or cores that another engine has locked; 1 other errors.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from cleave import distribution, logs
from cleave.distribution import MissingExtraError
from cleave.rpc.agent_discovery import AgentSourceUnreachable, DiscoveryError, list_agents
from cleave.shm import core_locks
from cleave_worker.agent import cpu_cores, memory_lock, subreaper
from cleave_worker.agent.agent import WorkerAgent
from cleave_worker.agent.config import AgentConfig, parse
from cleave_worker.agent.launch import LaunchError, find_cache_faults, has_gpu

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; return the exit code."""
    config = parse(sys.argv[1:] if argv is None else argv)
    text_format = logs.TextFormatter(f"%(asctime)s %(levelname)s {config.name}: %(message)s")
    logs.configure(config.log_format, text=text_format, always={"instance": config.name})
    gpu = config.engine == "vllm" and has_gpu()
    if fault := memory_lock.explain_limit():
        _log.warning(fault)
    if config.data_parallel_size > 1 and not config.gang:
        return _fail(ValueError("--data-parallel-size: start all ranks with cleave-cell"), 2)
    locks = cpu_cores.CoreLocks(core_locks.get_lock_folder(), config.name)
    try:
        if config.engine == "emulated":
            distribution.require("worker")
        if gpu:
            _drop_unwritable_caches()
        locked = locks.acquire(_plan_cores(config, gpu), config.allow_shared_cores)
        subreaper.become_subreaper()
        return asyncio.run(_run(config, locked, gpu))
    except (cpu_cores.CoresError, LaunchError, DiscoveryError, MissingExtraError) as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(error, 1)
    finally:
        locks.release()


async def _run(config: AgentConfig, locked: tuple[int, ...], gpu: bool) -> int:
    # A malformed source is bad usage, and should be reported before the model loads.
    with contextlib.suppress(AgentSourceUnreachable):
        await list_agents(config.peers)
    return await WorkerAgent(config, locked, gpu).run()


def _drop_unwritable_caches() -> None:
    """Start the engine without the folders that it cannot write: they only save time."""
    for name, fault in find_cache_faults(os.environ).items():
        _log.warning(fault)
        del os.environ[name]


def _plan_cores(config: AgentConfig, gpu: bool) -> cpu_cores.CoreRequest:
    return cpu_cores.plan_cores(
        config.cores,
        frozenset(os.sched_getaffinity(0)),
        cpu_cores.list_online_cores(),
        pinned_by_default=config.engine == "vllm" and not gpu,
        num_ranks=config.num_ranks,
        owner=config.name,
    )


def _fail(error: Exception, code: int) -> int:
    print(f"cleave-worker: {error}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
