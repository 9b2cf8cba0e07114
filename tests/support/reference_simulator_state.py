"""State of the reference simulator: requests, micro-batches, and instances with their KV."""

import math
from collections import deque
from dataclasses import dataclass, field

from cleave.perf.timing import interpolate_table
from cleave.policy import role_flipping
from cleave.policy.admission import GIVEN_UP_TOKENS, LATE_TPOT_SHARE, RECOVERY_SHARE, TPOT_SHARE
from cleave.policy.dispatch import TIE_WEIGHT
from cleave.policy.prompt_order import HANDOFF_SHARE
from cleave.policy.queue_model import DEFAULT_SUMS, add_completion, fit_prompt_times
from cleave.simulator.fleet import Batching, FlipThresholds, PrefillOrder, SimulatedEngine

from tests.support.reference_prefix_cache import Block, PrefixCache

NAN = math.nan


@dataclass(eq=False)
class Request:
    number: int
    arrival: float
    prompt: int
    output: int
    predicted: int
    token_times: list[float] = field(default_factory=list)
    computed: int = 0
    pull_number: int = 0
    member_number: int = 0
    joined: int = 0
    """Tokens that it had when it last joined a batch."""
    blocks: int = 0
    kv: int = 0
    remote: bool = False
    queued: float = 0.0
    prefill: "Instance | None" = None
    decode: "Instance | None" = None
    preemptions: int = 0
    refused: bool = False
    left_out: bool = False
    """Of the latest iteration, for want of blocks or tokens."""
    is_whole: bool = False
    """Its instance has allocated blocks for all of the prompt that it computes."""
    hashes: list[int] = field(default_factory=list)
    held: list[Block] = field(default_factory=list)
    held_by_source: list[Block] = field(default_factory=list)
    cached: int = 0
    pull_cached: int = 0
    prefill_start: float = NAN
    prefill_end: float = NAN
    transfer_start: float = NAN
    transfer_end: float = NAN
    decode_start: float = NAN
    end: float = NAN

    @property
    def generated(self) -> int:
        return len(self.token_times)

    @property
    def first_token(self) -> float:
        return next(iter(self.token_times), NAN)

    @property
    def todo(self) -> int:
        return self.prompt + self.generated

    def name_blocks(self, count: int) -> list[object]:
        """Content of its first full blocks; after those of its prompt no other request has it."""
        own = [(self.number, at) for at in range(len(self.hashes), count)]
        return [*self.hashes[:count], *own]

    @property
    def left(self) -> int:
        return self.output - self.generated

    def predict_remaining(self, capacity: int) -> int:
        """Predicted remaining output, or the full prediction beyond it; at most the capacity."""
        left = (
            self.predicted - self.generated if self.generated < self.predicted else self.predicted
        )
        return min(left, capacity - self.todo + 1)


@dataclass(eq=False)
class Slot:
    members: list[Request] = field(default_factory=list)
    prompts: list[Request] = field(default_factory=list)
    in_flight: bool = False
    decoding: list[Request] = field(default_factory=list)
    begin: float = NAN
    finish: float = NAN

    @property
    def unended(self) -> list[Request]:
        """Members but for those that are left out, or have ended and still hold blocks."""
        return [each for each in self.members if math.isnan(each.end) and not each.left_out]


class Instance:
    def __init__(self, number: int, role: str, engine: SimulatedEngine, longest: int) -> None:
        self.number, self.role, self.engine = number, role, engine
        self.size = engine.kv_block_size
        self.total = self.free = engine.kv_capacity_tokens // self.size
        self.reserve, self.kv_weight = 0, 1.0
        if engine.batching in (Batching.ORCA, Batching.FASTER_TRANSFORMER):
            self.reserve = math.ceil((engine.max_model_len or longest) / self.size)
        self.caches = engine.prefix_caching and not self.reserve
        self.cache = PrefixCache(self.total)
        self.waiting: deque[Request] = deque()
        self.sorted = 0
        self.late: list[Request] = []
        self.pulling = 0
        self.loaded: list[Request] = []
        self.partial: Request | None = None
        self.running = self.handed_over = 0
        self.ended: list[Request] = []
        self.sent: list[Request] = []
        """Requests whose KV was pulled, which still hold blocks here."""
        timing = engine.timing
        self.schedules_ahead = (
            timing.schedules_ahead and timing.stages == 1 and engine.batching is Batching.VLLM
        )
        self.scheduled = 0.0 if self.schedules_ahead else math.inf
        self.slots = [Slot() for _ in range(engine.timing.stages)]
        self.flight: deque[Slot] = deque()
        self.stage_free = [0.0] * engine.timing.stages
        self.link = 0.0
        self.pending_prompt_tokens = self.resident_tokens = self.last_pick = 0
        self.since, self.prompt_ms, self.token_ms, self.upper_token_ms = 0.0, 0.0, 0.1, 0.1
        self.num_waiting = 0
        self.completion_sums = DEFAULT_SUMS
        self.busy = self.area = self.kv_at = 0.0
        self.kv = self.peak = self.iterations = self.decode_iterations = 0
        self.prompt_tokens = self.decode_tokens = self.preemptions = self.batch_peak = 0
        self.intervals: list[tuple[float, float]] = []

    def count(self, tokens: int) -> int:
        return self.reserve or math.ceil(tokens / self.size)

    def push(self, request: Request) -> None:
        self.waiting.insert(len(self.waiting) - len(self.late), request)

    def is_late(self, request: Request, now: float) -> bool:
        if not math.isnan(request.first_token):
            return False
        engine, target = self.engine, self.engine.ttft_ms
        if self.role == "prefill":
            target -= HANDOFF_SHARE * engine.ttft_ms
        own = engine.tpot_ms if request.remote else self.predict_prompt(request)
        return now - request.arrival + own > target

    def predict_prompt(self, request: Request) -> float:
        """Of what is not cached here."""
        timing, tokens = self.engine.timing, request.todo
        tokens -= self.size * len(self.find_cached(request))
        chunk = min(tokens, self.engine.max_num_batched_tokens)
        ms = interpolate_table(timing.prompt_step, timing.prompt_ms, chunk)
        squares = request.todo**2 - (request.todo - tokens) ** 2
        return ms * tokens / chunk + timing.prompt_square_ms * squares

    def keeps_tpot(self, request: Request, slot: Slot, now: float) -> bool:
        if (self.running or self.pulling) == 0 or request.preemptions:
            return True
        timing, target = self.engine.timing, self.engine.tpot_ms
        contexts = ((self.total - self.free) * self.size + request.todo) / timing.stages
        ms = decode = timing.predict_decode_ms(len(slot.unended) + 1, contexts)
        alone = timing.predict_decode_ms(1, request.todo / timing.stages)
        room = max(target - alone, 0.0)
        if ms > alone + (LATE_TPOT_SHARE if request in self.late else TPOT_SHARE) * room:
            return False
        if request.remote:
            return True
        ms += self.predict_prompt(request)
        for member in slot.unended:
            begun = member.first_token if member.first_token <= now else now
            gain = member.predict_remaining(self.total * self.size)
            limit = alone + TPOT_SHARE * room
            gain *= RECOVERY_SHARE * (limit - decode)
            slack = limit * member.generated - (now - begun) + gain
            if slack < ms and slack >= -GIVEN_UP_TOKENS * target:
                return False
        return True

    def sort_waiting(self, now: float) -> None:
        engine = self.engine
        if engine.order is PrefillOrder.IN_TIME:
            while self.waiting[0] not in self.late and self.is_late(self.waiting[0], now):
                self.late.append(self.waiting[0])
                self.waiting.rotate(-1)
            return
        if engine.order is PrefillOrder.FCFS or self.sorted or self.role == "decode":
            return
        self.sorted = min(engine.prefill_sched_batch, len(self.waiting))
        some = [self.waiting.popleft() for _ in range(self.sorted)]
        sign = 1 if engine.order is PrefillOrder.SJF else -1
        some.sort(key=lambda r: sign * r.todo)
        self.waiting.extendleft(reversed(some))

    def fits(self, request: Request) -> bool:
        tokens = request.prompt if self.role == "prefill" else request.prompt + request.output - 1
        blocks = math.ceil(tokens / self.size)
        if self.reserve and not blocks <= self.reserve <= self.total:
            return False
        return blocks <= self.total

    def queue(self, in_tokens: bool) -> float:
        """The score of a prefill instance."""
        tie = self.last_pick * TIE_WEIGHT
        if in_tokens:
            return self.pending_prompt_tokens + tie
        end = (
            self.since
            + self.num_waiting * self.prompt_ms
            + self.pending_prompt_tokens * self.upper_token_ms
        )
        return end if self.pending_prompt_tokens else tie

    def answer(self, tokens: int, now: float) -> None:
        """Record that a prompt of `tokens` tokens is computed."""
        self.pending_prompt_tokens -= tokens
        self.num_waiting -= 1
        self.completion_sums = add_completion(self.completion_sums, tokens, now - self.since)
        self.prompt_ms, self.token_ms, self.upper_token_ms = fit_prompt_times(self.completion_sums)
        self.since = now

    def take(self, request: Request, tokens: int, now: float) -> None:
        """Allocate blocks so that `request` can hold `tokens`."""
        blocks = self.count(tokens) - request.blocks
        if blocks > 0:
            self.free -= blocks
            request.blocks += blocks
            request.held += self.cache.allocate(blocks)
        assert self.free >= 0
        assert self.free == self.cache.num_free

    def find_cached(self, request: Request) -> list[Block]:
        """The blocks of a request that are cached here."""
        limit = (request.todo - 1) // self.size
        return self.cache.find(request.name_blocks(limit)) if self.caches else []

    def take_cached(self, request: Request, now: float) -> int:
        """Let the request hold the blocks that are cached here; their tokens."""
        blocks = self.find_cached(request)
        self.free -= self.cache.hold(blocks)
        request.held = list(blocks)
        request.blocks = len(blocks)
        self.keep(request, len(blocks) * self.size, now)
        return len(blocks) * self.size

    def cache_prompt(self, request: Request, tokens: int) -> None:
        """Cache the full blocks of the first `tokens` of a prompt."""
        if self.caches:
            self.cache.name(request.held, request.hashes[: tokens // self.size])

    def release(self, request: Request, blocks: list[Block], tokens: int) -> None:
        """Free blocks of a request; the content of those that `tokens` fill stays cached."""
        full = tokens // self.size if self.caches else 0
        self.free += self.cache.release(blocks, request.name_blocks(full))

    def keep(self, request: Request, tokens: int, now: float) -> None:
        """Record that `request` holds `tokens` of KV from now on."""
        self.area += self.kv * (now - self.kv_at)
        self.kv_at = now
        self.kv += tokens - request.kv
        request.kv = tokens
        self.peak = max(self.peak, self.kv)

    def drop(self, request: Request, now: float, is_ahead: bool = False) -> None:
        # The latest token is not known yet.
        is_ahead = is_ahead and self.schedules_ahead and request.kv > request.joined
        self.release(request, request.held, request.kv - is_ahead)
        request.held = []
        request.blocks = 0
        self.keep(request, 0, now)


class Manager:
    """Applies the decisions of the role-flipping policy."""

    ROLES = ("prefill", "decode", "mixed")

    def __init__(self, instances: list[Instance], thresholds: FlipThresholds) -> None:
        self.instances, self.thresholds, self.flips = instances, thresholds, 0
        self.members, self.history = (
            role_flipping.build_members(len(instances)),
            role_flipping.build_pressure_history(),
        )
        self.members["configured_role"] = [self.ROLES.index(i.role) for i in instances]
        self.members["role"], self.members["is_open"] = self.members["configured_role"], 1

    def check_flip(self, now: float) -> None:
        for member, i in zip(self.members, self.instances, strict=True):
            worked = now - i.since if i.pending_prompt_tokens else 0.0
            wait = i.num_waiting * i.prompt_ms + i.pending_prompt_tokens * i.token_ms - worked
            member["wait_ms"] = max(wait, 0.0)
            member["use"] = (1.0 - i.free / i.total) * (1 + (3 / i.running if i.running else 0))
        slot, role = role_flipping.decide(self.members, self.history, self.thresholds, now)
        if slot != role_flipping.NONE:
            role_flipping.record_role(self.members, slot, role, now)
            self.instances[slot].role = self.ROLES[role]
            self.flips += 1


def find_peak(requests: list[tuple[int, int]]) -> int:
    """Peak of the held tokens, by simulating every step; the last token is never written."""
    peak = 0
    for step in range(max(left for _, left in requests)):
        peak = max(peak, sum(resident + step for resident, left in requests if step < left))
    return peak
