"""The engine loop and its load page."""

import asyncio
import time
from array import array
from dataclasses import replace
from pathlib import Path

from cleave.shm.load_page import LoadPage
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits
from cleave_worker.emulator.sequence import EngineRequest, FinishReason


class Collected:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = asyncio.Event()

    def push(self, token: int, finish: FinishReason | None) -> None:
        self.tokens.append(token)
        if finish:
            self.ended.set()

    def fail(self, reason: str) -> None:
        self.ended.set()


def request(num_tokens: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest("r", array("I", [7] * num_tokens), max_tokens, ignore_eos=True)


async def test_the_load_page_is_exact_at_every_moment(config, tmp_path: Path) -> None:
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=512)
    engine = EmulatedEngine(replace(config, limits=limits, time_scale=1.0), tmp_path / "load")
    with LoadPage(tmp_path / "load") as page:
        await engine.start()
        one, other = Collected(), Collected()
        engine.submit(request(600), one)
        load = page.read()
        assert (load.num_running, load.num_waiting, load.pending_prompt_tokens) == (0, 1, 600)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        load = page.read()
        assert (load.num_running, load.num_waiting, load.pending_prompt_tokens) == (1, 0, 600)
        assert load.kv_blocks_total - load.kv_blocks_free == 32
        second = engine.submit(request(50), other)
        load = page.read()
        assert (load.num_running, load.num_waiting, load.pending_prompt_tokens) == (1, 1, 650)
        engine.abort(second)
        assert page.read().pending_prompt_tokens == 600
        await asyncio.wait_for(one.ended.wait(), 20)
        load = page.read()
        assert (load.num_running, load.num_waiting, load.pending_prompt_tokens) == (0, 0, 0)
        assert load.kv_blocks_free == load.kv_blocks_total
        assert load.kv_cache_usage == 0
        assert (load.prefix_cache_queries, load.prefix_cache_hits) == (600, 0)
        await engine.stop()
    assert len(one.tokens) == 3
    assert other.tokens == []


async def test_prompts_come_back_from_host_memory_one_after_another(config, tmp_path: Path) -> None:
    small = replace(config, num_blocks=128, host_blocks=1_000, host_token_ms=0.1)
    engine = EmulatedEngine(small, tmp_path / "load")
    prompts = [array("I", [number] * 1_000) for number in range(3)]
    with LoadPage(tmp_path / "load") as page:
        await engine.start()
        for prompt in (*prompts, *prompts[:2]):
            listener = Collected()
            engine.submit(EngineRequest("r", prompt, 3, ignore_eos=True), listener)
            await asyncio.wait_for(listener.ended.wait(), 20)
        load = page.read()
        await engine.stop()
    # 62 of the 63 blocks of each.
    assert load.host_kv_hits + load.prefix_cache_hits == 2 * 992
    assert load.host_kv_hits > 1_000
    assert round(load.host_kv_load_ms * 10) == load.host_kv_hits


async def test_aborting_twice_or_after_the_end_does_nothing(config) -> None:
    engine = EmulatedEngine(config)
    await engine.start()
    listener = Collected()
    sequence = engine.submit(request(5), listener)
    await asyncio.wait_for(listener.ended.wait(), 20)
    engine.abort(sequence)
    engine.abort(engine.submit(request(5), listener))
    assert engine.metrics.finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    await engine.stop()


async def test_a_late_loop_does_not_rush_through_the_missed_time(config) -> None:
    engine = EmulatedEngine(replace(config, time_scale=1.0))
    await engine.start()
    listener = Collected()
    engine.submit(request(5, max_tokens=1000), listener)
    engine.faults.apply(b'{"hang": true}')
    await asyncio.sleep(1.0)
    engine.faults.clear()
    started, before = time.monotonic(), len(listener.tokens)
    await asyncio.sleep(0.1)
    # At 20 ms per token; 0.1 s of the lag may be caught up, not the whole second of 50 tokens.
    may_have = (time.monotonic() - started + 0.1) / 0.0199 + 2
    assert before <= 1
    assert len(listener.tokens) <= may_have
    await engine.stop()
