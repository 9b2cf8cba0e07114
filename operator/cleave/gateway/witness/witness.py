"""The witness: hands canary prompts over between all pairs of engines, again and again.

Run by one process of one gateway: the one with rank 0 at most instances of a table. What a pair's
canaries show goes to the decode side's agent, which sends it to all processes of all gateways. What
is hard: canaries must not delay requests, so they start only where nothing waits, count as load
like any request, and cost each engine at most a share of its time; and a fault must be found soon
all the same, so canaries are short where an engine has many partners, and those that decide about a
pair do not wait for the budget.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterable

from cleave.gateway.context import GatewayContext
from cleave.gateway.witness.canary import (
    BlurredCanaryError,
    CanaryAnswer,
    EngineCosts,
    FaultyCanaryError,
    run_canary,
)
from cleave.gateway.witness.pair_list import STANDINGS, TRUST, PairList, WitnessedPair
from cleave.gateway.witness.pair_recorder import PairKey, PairRecorder, SendProofs
from cleave.policy import pair_trust
from cleave.policy.kv_transfer_sample import TransferSample
from cleave.policy.pair_trust import (
    BytesVerdict,
    EngineBudget,
    PairStanding,
    PullRate,
    TokenVerdict,
)
from cleave.router.instance import RoutedInstance
from cleave.router.pair_proofs import PairResult
from cleave.router.role_flipper import is_leader
from cleave.router.score_table import ScoreTable
from cleave.time_slices import Steps, run_in_slices

log = logging.getLogger(__name__)

TICK_S = 0.25
PERIOD_S = 20.0
"""Between two canaries of a pair, where the budget allows it."""
MAX_CANARIES = 4
"""Canaries at a time; no two of them use the same engine."""
RENEWAL_S = 20.0
"""Interval at which the result of a closed pair is recorded again, as results expire."""
RENEWAL_LIMIT_S = 60.0
"""Time since its newest canary after which it is renewed no more: nothing tests the pair."""
_BUSY_S = 1.0
"""Delay of a canary whose engines are busy or over their budget."""
_LENGTH_SHARE = 0.9
"""Share of the model's length that a prompt may take, as its tokens are estimated."""


class Witness:
    """Tests the pairs of all models in the router's registry."""

    def __init__(
        self,
        context: GatewayContext,
        share: float,
        send: SendProofs,
        *,
        period_s: float = PERIOD_S,
        seed: int | None = None,
    ) -> None:
        """`share`: of each engine's time that canaries may take, above 0; `period_s`: least time
        between two canaries of a pair."""
        self._context = context
        self._registry = context.router.registry
        self._share = share
        self._period_s = period_s
        self._recorder = PairRecorder(context, send)
        self._random = random.Random(seed)
        self._states: list[tuple[ScoreTable, int]] = []
        """The tables whose pairs are known, and how often each had changed."""
        self._pairs = PairList(period_s)
        self._budgets: dict[str, EngineBudget] = {}
        """By boot."""
        self._block_bytes: dict[str, deque[float]] = {}
        """Bytes per block of the newest canaries, by the boot of the decode engine."""
        # A token covers at least one character: until more is known, no prompt can be too long.
        self._characters_per_token = 1.0
        self._tests: dict[asyncio.Task[None], PairKey] = {}

    async def run(self) -> None:
        """Test pairs until cancelled."""
        try:
            while True:
                await self.check(self._context.clock())
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._tests:
                task.cancel()
            self._recorder.stop()

    async def check(self, now: float) -> None:
        """Start the canaries that are due."""
        await run_in_slices(self._update_pairs(now))
        pairs = self._pairs.take_next(now)
        self._review_results(pairs, now)
        if len(self._tests) >= MAX_CANARIES:
            return
        due = [each for each in pairs if each.history.due_s <= now]
        due.sort(key=_rank)
        busy = {boot for key in self._tests.values() for boot in key}
        for pair in due:
            if busy.isdisjoint(pair.key) and self._may_start(pair, now):
                busy.update(pair.key)
                self._start(pair)
                if len(self._tests) >= MAX_CANARIES:
                    return

    def _update_pairs(self, now: float) -> Steps[None]:
        """Adapt the pairs to the instances."""
        tables = [each for each in self._registry.list_tables() if is_leader(each.instances)]
        states = [(each, each.num_changes) for each in tables]
        if states == self._states:
            return
        yield from self._pairs.update(tables, now)
        self._states = states
        boots = self._pairs.boots
        self._budgets = {
            boot: self._budgets.get(boot) or EngineBudget(self._share, now) for boot in boots
        }
        self._block_bytes = {k: v for k, v in self._block_bytes.items() if k in boots}

    def _review_results(self, pairs: Iterable[WitnessedPair], now: float) -> None:
        """Adopt faults that other processes have found, as one that tested the pair before, and
        renew or end results of closed pairs."""
        for pair in pairs:
            history, result = pair.history, pair.decode.pairs.get(pair.key[0])
            if result is None:
                continue
            is_closed = result.is_closed(now)
            if is_closed and not history.is_closed and result.at > history.tested_s:
                fault = result.reason.removeprefix(f"{pair.name}: ")
                self._record_fault(pair, "reported", fault)
            elif not history.is_closed:
                continue
            elif not is_closed and STANDINGS.get(result.trust) is history.standing:
                # Too busy to be tested: requests may use it until a canary shows more.
                log.warning("the pair %s is used again: its result has expired", pair.name)
                history.restore(PairStanding.UNPROVEN)
            elif now - history.recorded_s > RENEWAL_S and now - history.tested_s < RENEWAL_LIMIT_S:
                self._record(pair)

    # --- one canary ---

    def _may_start(self, pair: WitnessedPair, now: float) -> bool:
        """Whether both engines are idle enough and within their budgets; else it is put off."""
        history = pair.history
        wait_s = max(self._budgets[boot].get_wait_s(now) for boot in pair.key)
        if wait_s > 0 and not history.is_urgent:
            history.due_s = now + min(wait_s, self._period_s)
            return False
        if not self._can_take(pair):
            history.due_s = now + self._random.uniform(0.0, _BUSY_S)
            return False
        return True

    def _can_take(self, pair: WitnessedPair) -> bool:
        """Whether both engines are idle or, for a canary that decides about the pair, no prompt
        waits there and theirs has room."""
        tokens = self._choose_tokens(pair) if pair.history.is_urgent else 0
        return all(
            is_idle(each) or (tokens > 0 and not has_waiting(each) and each.has_room(tokens))
            for each in (pair.prefill, pair.decode)
        )

    def _start(self, pair: WitnessedPair) -> None:
        self._pairs.keep(pair)
        task = asyncio.create_task(self._test(pair))
        self._tests[task] = pair.key
        task.add_done_callback(self._handle_test_end)

    def _handle_test_end(self, task: asyncio.Task[None]) -> None:
        del self._tests[task]
        if not task.cancelled() and task.exception() is not None:
            log.error("a canary handoff has failed", exc_info=task.exception())

    async def _test(self, pair: WitnessedPair) -> None:
        context, history, costs = self._context, pair.history, EngineCosts()
        is_urgent = history.is_urgent
        tokens = self._choose_tokens(pair)
        characters = max(int(tokens * self._characters_per_token), 1)
        # Until its result is known, no other canary of the pair is due.
        history.due_s = context.clock() + 4 * self._period_s
        pick = context.router.reserve(pair.prefill, pair.decode, tokens, 1)
        targets = pair.prefill.target, pair.decode.target
        try:
            answer = await run_canary(
                context, *targets, pair.prefill.registration.model, characters, self._random, costs
            )
            self._assess(pair, answer, characters)
        except BlurredCanaryError as error:
            if pair.blur != str(error):
                pair.blur = str(error)
                log.info("a canary handoff %s shows nothing: %s", pair.name, error)
            self._count("blurred")
            history.record_blurred(context.clock(), is_deficit=False)
        except FaultyCanaryError as error:
            self._record_fault(pair, error.kind, str(error))
        finally:
            context.router.release(pick)
            self._record_cost(targets[0].boot_id, "prefill", costs.prefill_ms, is_urgent)
            self._record_cost(targets[1].boot_id, "decode", costs.decode_ms, is_urgent)

    def _choose_tokens(self, pair: WitnessedPair) -> int:
        queue = pair.prefill.in_flight.queue
        lengths = (pair.prefill.registration.max_model_len, pair.decode.registration.max_model_len)
        limit = min((each for each in lengths if each), default=pair_trust.MAX_TOKENS)
        allowed_ms = self._share * self._period_s * 1000 / pair.num_partners
        # Slow and partial transfers show best in long prompts.
        draw = 1.0 if pair.history.is_urgent else self._random.random()
        max_tokens = int(limit * _LENGTH_SHARE) - 1
        return pair_trust.choose_prompt_tokens(
            allowed_ms, queue.prompt_ms, queue.token_ms, max_tokens, draw
        )

    def _assess(self, pair: WitnessedPair, answer: CanaryAnswer, characters: int) -> None:
        """Record what a canary has shown. Raises FaultyCanaryError."""
        sample, now = answer.sample, self._context.clock()
        measured = max(characters / sample.num_tokens, 1.0)
        self._characters_per_token += 0.5 * (measured - self._characters_per_token)
        if answer.token is TokenVerdict.DIFFERENT:
            text = f"the first token after {sample.num_tokens:,} prompt tokens differs"
            raise FaultyCanaryError("tokens", text)
        known = self._block_bytes.setdefault(pair.key[1], deque(maxlen=9))
        verdict = pair_trust.assess_bytes(sample, pair_trust.find_block_bytes(known))
        if verdict is BytesVerdict.MISSING:
            raise FaultyCanaryError("bytes", _describe_missing(sample))
        if verdict is not BytesVerdict.MOVED:
            is_deficit = verdict is BytesVerdict.BLURRED
            if pair.history.record_blurred(now, is_deficit=is_deficit):
                raise FaultyCanaryError("bytes", _describe_missing(sample))
            self._count("blurred")
            return
        seems_slow = False
        if sample.is_isolated:
            known.append(sample.block_bytes)
            seems_slow = self._check_rate(pair, sample)
        self._count("near_tie" if answer.token is TokenVerdict.NEAR_TIE else "good")
        was_failed = pair.history.standing is PairStanding.FAILED
        pair.history.record_good(now, self._period_s, seems_slow=seems_slow)
        if was_failed and pair.history.standing is PairStanding.PROVEN:
            log.warning("the pair %s is used again: its canary handoffs are good", pair.name)
        if pair.history.standing is PairStanding.PROVEN:
            pair.reason = ""
        self._record(pair)

    def _check_rate(self, pair: WitnessedPair, sample: TransferSample) -> bool:
        """Whether the canary was much slower than its like; so more of them are due soon.
        Raises FaultyCanaryError when several were."""
        registration = pair.decode.registration
        ranks = max(registration.tensor_parallel_size, 1) * max(
            registration.pipeline_parallel_size, 1
        )
        rate = PullRate(sample.bytes_per_s, sample.seconds * 1e3 / ranks)
        pair.rates = (*pair.rates, rate)[-pair_trust.NUM_RATES :]
        like = [each.rated for each in self._pairs.list_like(pair)]
        rated = pair.rated
        due = pair_trust.compute_due_rate(rated, like)
        if len(pair.rates) == pair_trust.NUM_RATES and pair_trust.is_slow(pair.rate, due):
            others = "as usual it would be" if rated.usual_bytes_per_s else "other pairs at"
            best = f"pulled at {pair.rate.bytes_per_s / 1e9:.3g} GB/s"
            raise FaultyCanaryError("slow", f"{best}, {others} {due / 1e9:.3g} GB/s")
        is_first = not due and not rated.usual_bytes_per_s
        if is_first or (due and rate.bytes_per_s >= pair_trust.STEADY_RATIO * due):
            pair.record_steady(rate.bytes_per_s)
        return pair_trust.is_slow(rate, due)

    # --- results ---

    def _record_fault(self, pair: WitnessedPair, kind: str, reason: str) -> None:
        history = pair.history
        before = history.standing
        confirm_s = pair_trust.CONFIRM_SLOW_S if kind == "slow" else pair_trust.CONFIRM_S
        history.record_fault(self._context.clock(), confirm_s)
        pair.reason = f"{pair.name}: {reason}"
        self._count(kind)
        if history.standing is not before:
            is_failed = history.standing is PairStanding.FAILED
            end = "until its canary handoffs are good" if is_failed else "until this is confirmed"
            log.warning("a pair is not used %s: %s", end, pair.reason)
            self._schedule_neighbors(pair)
        self._record(pair)

    def _schedule_neighbors(self, bad: WitnessedPair) -> None:
        """Test the other pairs of both engines next: the fault may be an engine's."""
        now = self._context.clock()
        for pair in self._pairs.list_neighbors(bad):
            if pair is not bad:
                pair.history.due_s = min(pair.history.due_s, max(now, pair.history.tested_s + 5.0))

    def _record(self, pair: WitnessedPair) -> None:
        """Apply the pair's standing here, and send it to the decode side's agent."""
        if pair.has_ended or not self._pairs.has(pair):
            return
        history, now = pair.history, self._context.clock()
        history.recorded_s = now
        trust = TRUST[history.standing]
        rate = pair.rate
        result = PairResult(
            pair.prefill.name, trust, now, rate.bytes_per_s, rate.pull_ms, pair.reason
        )
        self._recorder.record(pair.decode, pair.key, result)

    def _count(self, result: str) -> None:
        self._context.metrics.canaries[result] += 1

    def _record_cost(self, boot_id: str, phase: str, ms: float, is_urgent: bool) -> None:
        """Urgent canaries are few; if they counted, the engine's other pairs would have to wait."""
        budget = self._budgets.get(boot_id)
        if budget is not None and not is_urgent:
            budget.record(ms, self._context.clock())
        self._context.metrics.canary_seconds[phase] += ms / 1000


def _rank(pair: WitnessedPair) -> tuple[bool, bool, float]:
    """The order of pairs that are due: those that wait for a decision, closed ones, the oldest."""
    history = pair.history
    return not history.is_urgent, not history.is_closed, history.tested_s


def is_idle(instance: RoutedInstance) -> bool:
    """Whether no prompt waits there and half of the KV cache is free."""
    is_free = 2 * instance.load.kv_blocks_free >= instance.registration.kv_blocks_total
    return is_free and not has_waiting(instance)


def has_waiting(instance: RoutedInstance) -> bool:
    """Whether prompts wait there."""
    is_pending = instance.in_flight.prompt.pending >= 1.0
    return is_pending or instance.load.num_waiting > 0


def _describe_missing(sample: TransferSample) -> str:
    lost = f", and counted {sample.num_failed:.0f} lost" if sample.num_failed else ""
    return (
        f"the decode engine pulled {sample.num_bytes:,.0f} bytes for "
        f"{sample.num_tokens:,} prompt tokens{lost}"
    )
