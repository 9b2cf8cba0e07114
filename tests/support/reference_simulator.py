"""A slow reference simulator that simulates every iteration and block, to verify the fast one.

Written from the contract (fleet.py, outcome.py) and the emulated engine's scheduler, without leaps,
arrays or links; it shares the latency model and the decisions of policy/ with the fast one.
"""

import heapq
import itertools
import math
from collections import deque

from cleave.perf.timing import PromptChunk
from cleave.policy.dispatch import TIE_WEIGHT, compute_headroom
from cleave.simulator.fleet import Admission, Batching, DispatchPolicy, SimulatedFleet
from cleave.simulator.trace import Trace

from tests.support.reference_blocks import Blocks
from tests.support.reference_simulator_state import Instance, Manager, Request, Slot, find_peak

FLIP_CHECK, ARRIVE, DELIVER, HANDOFF, PULLED, ITERATION = range(6)


class Reference(Blocks):
    def __init__(self, fleet: SimulatedFleet, trace: Trace) -> None:
        self.fleet = fleet
        outputs, predicted = trace.output_tokens, trace.predicted_tokens
        lengths = trace.prompt_tokens, outputs, outputs if predicted is None else predicted
        rows = zip(trace.arrival_ms, *lengths, strict=True)
        self.requests = [
            Request(n, float(a), *(int(each) for each in rest)) for n, (a, *rest) in enumerate(rows)
        ]
        if trace.blocks is not None:
            starts, numbers = trace.blocks.starts, trace.blocks.numbers
            for request in self.requests:
                own = numbers[starts[request.number] : starts[request.number + 1]]
                # The end of a prompt that fills no KV block is not cached.
                request.hashes = own[: request.prompt // trace.blocks.block_tokens].tolist()
        longest = max(r.prompt + r.output for r in self.requests)
        self.instances = [
            Instance(0, role, pool.engine, longest)
            for role, pools in (
                ("prefill", fleet.prefill),
                ("decode", fleet.decode),
                ("mixed", fleet.mixed),
            )
            for pool in pools
            for _ in range(pool.engines)
        ]
        most = max((i.total * i.size for i in self.instances if i.role != "prefill"), default=0)
        for number, instance in enumerate(self.instances):
            kv = instance.total * instance.size
            instance.number, instance.kv_weight = number, max(most / max(kv, 1), 1.0)
        self.ranks: dict[int, list[Instance]] = {}
        rest = deque(self.instances)
        while rest:
            group = [rest.popleft() for _ in range(rest[0].engine.ranks)]
            self.ranks |= {each.number: group for each in group}
        self.events: list[tuple[float, int, int, object]] = []
        self.numbers = itertools.count(1)
        self.last_pick = 0
        self.prompts: deque[Request] = deque()
        self.handoffs: deque[Request] = deque()
        self.now = 0.0
        self.manager = Manager(self.instances, fleet.flipping) if fleet.flipping else None

    def run(self) -> "Reference":
        for request in self.requests:
            self.at(request.arrival, ARRIVE, request)
        if self.manager:
            self.at(1_000.0, FLIP_CHECK, None)
        kinds = self.check_flip, self.arrive, self.deliver, self.offer, self.arrived, self.step
        while self.events:
            self.now, kind, _, what = heapq.heappop(self.events)
            kinds[kind](what)
        return self

    def check_flip(self, _: None) -> None:
        if self.events:
            self.manager.check_flip(self.now)
            self.at(self.now + 1_000.0, FLIP_CHECK, None)

    def at(self, time: float, kind: int, what: object) -> None:
        number = next(self.numbers)
        order = what.number if kind == ITERATION else number
        heapq.heappush(self.events, (time, kind, order * 1_000_000 + number, what))

    # --- routing ---

    def of(self, *roles: str) -> list[Instance]:
        return [i for i in self.instances if i.role in roles]

    def arrive(self, request: Request) -> None:
        is_deferred = self.fleet.defers_dispatch
        if is_deferred:
            mixed = any(i.fits(request) for i in self.of("mixed"))
            first = not self.of("prefill", "mixed") or any(
                i.fits(request) for i in self.of("prefill", "mixed")
            )
            second = not self.of("decode", "mixed") or any(
                i.fits(request) for i in self.of("decode", "mixed")
            )
            request.refused = not (mixed or (first and second))
        else:
            first, second = self.choose(request)
            selected = [i for i in (first, second) if i]
            request.refused = not all(i.fits(request) for i in selected)
            if not request.refused:
                self.last_pick += 1
                request.prefill, request.decode = first, second
                for i in selected:
                    i.last_pick = self.last_pick
                if first or self.of("prefill", "mixed"):
                    entry = first or second
                    entry.since = entry.since if entry.pending_prompt_tokens else self.now
                    entry.pending_prompt_tokens += request.prompt
                    entry.num_waiting += 1
                if second:
                    second.resident_tokens += request.prompt + request.predicted
        if not request.refused:
            self.at(self.now + self.fleet.dispatch_ms, DELIVER, request)

    def choose(self, request: Request) -> tuple[Instance | None, Instance | None]:
        entries, decoders = self.of("prefill", "mixed"), self.of("decode", "mixed")
        round_robin = self.fleet.dispatch is DispatchPolicy.ROUND_ROBIN
        in_tokens = self.fleet.dispatch is DispatchPolicy.PENDING_TOKENS

        def total(i: Instance) -> float:
            return (
                i.last_pick
                if round_robin
                else i.pending_prompt_tokens
                + i.resident_tokens * i.kv_weight
                + i.last_pick * TIE_WEIGHT
            )

        prefills, mixed = self.of("prefill"), self.of("mixed")
        best = min(
            prefills, key=lambda i: i.last_pick if round_robin else i.queue(in_tokens), default=None
        )
        decode = min(decoders, key=total, default=None)
        mixed_pick = min(mixed, key=total, default=None)
        if not decoders or not entries:
            return best, decode
        if best is None:
            return None, mixed_pick
        if mixed_pick:
            flipping = self.fleet.flipping
            wait_ms = flipping.headroom_ms if flipping else 0.0
            all_ms, tokens = best.completion_sums[4], best.completion_sums[2]
            headroom = compute_headroom(wait_ms, all_ms / tokens)
            if mixed_pick.pending_prompt_tokens < best.pending_prompt_tokens - 1.0 - headroom:
                return None, mixed_pick
        return best, decode

    def deliver(self, request: Request) -> None:
        if not self.of("prefill", "mixed"):
            request.prefill_end = request.arrival
            request.remote = True
            if not self.fleet.first_token_by_decode:
                request.token_times.append(request.arrival)
                if request.output == 1:
                    self.finish(request, request.arrival)
                    return
        if self.fleet.defers_dispatch:
            (self.handoffs if request.remote else self.prompts).append(request)
            self.announce(request.remote)
            return
        instance = request.prefill or request.decode
        request.queued = self.now
        instance.push(request)
        self.alert(instance)

    def offer(self, request: Request) -> None:
        if self.fleet.defers_dispatch:
            self.handoffs.append(request)
            self.announce(True)
        else:
            request.decode.push(request)
            self.alert(request.decode)

    def announce(self, remote: bool) -> None:
        for i in self.instances:
            if i.role != ("prefill" if remote else "decode"):
                self.alert(i)

    def alert(self, instance: Instance) -> None:
        if any(rank.flight for rank in self.ranks[instance.number] if rank is not instance):
            return
        if len(instance.flight) < len(instance.slots):
            self.at(self.now, ITERATION, instance)

    # --- transfers ---

    def pull(self, instance: Instance, request: Request) -> None:
        instance.pulling += 1
        request.pull_number = next(self.numbers)
        request.joined = request.todo
        request.pull_cached = instance.take_cached(request, self.now)
        instance.take(request, request.todo, self.now)
        instance.keep(request, request.todo - 1, self.now)
        transfer, source = self.fleet.transfer, request.prefill
        request.transfer_start = end = self.now
        if source:
            left = request.prompt - request.pull_cached
            tokens = math.ceil(left / source.size) * source.size
            per_token = transfer.token_ms
            if request.prompt >= transfer.overlap_from_tokens:
                per_token = max(per_token - transfer.overlapped_token_ms, 0)
            if transfer.is_shared:
                request.transfer_start = max(self.now, source.link)
            end = request.transfer_start + transfer.latency_ms + tokens * per_token
            source.link = end
            self.begun.append(tokens)
        if end > self.now:
            self.at(end, PULLED, request)
        else:
            self.pulled(request)

    def arrived(self, request: Request) -> None:
        self.pulled(request)
        self.alert(request.decode)

    def pulled(self, request: Request) -> None:
        request.transfer_end = self.now
        request.remote = False
        source = request.prefill
        if source:
            source.sent.append(request)
            if not source.schedules_ahead or not source.flight:
                self.release_sent(source)
            self.alert(source)
        request.queued = self.now
        request.decode.loaded.append(request)
        request.decode.loaded.sort(key=lambda each: each.pull_number)

    def release_sent(self, source: Instance) -> None:
        for request in source.sent:
            source.release(request, request.held_by_source, request.prompt)
            source.area += source.kv * (self.now - source.kv_at)
            source.kv_at = self.now
            source.kv -= request.prompt
        source.sent = []

    # --- iterations ---

    def step_ranks(self, ranks: list[Instance]) -> None:
        """All ranks begin together, and end when the longest iteration does."""
        running = [each for each in ranks if each.flight]
        if any(each.flight[0].finish > self.now for each in running):
            return
        for each in running:
            self.complete(each, each.flight.popleft())
        for each in ranks:
            self.form(each, each.slots[0])
        running = [each for each in ranks if each.flight]
        if not running:
            return
        finish = max(each.flight[0].finish for each in running)
        for each in running:
            slot = each.flight[0]
            each.busy += finish - slot.finish
            each.intervals[-1] = (slot.begin, finish)
            slot.finish = finish
        self.at(finish, ITERATION, running[0])

    def step(self, instance: Instance) -> None:
        if instance.engine.ranks > 1:
            self.step_ranks(self.ranks[instance.number])
            return
        ended = instance.flight and instance.flight[0].finish <= self.now
        if ended:
            slot = instance.flight.popleft()
            self.complete(instance, slot)
            self.form(instance, slot)
        if len(instance.slots) > 1 or not ended:
            while len(instance.flight) < len(instance.slots) and self.has_work(instance):
                slot = next(s for s in instance.slots if not s.in_flight)
                if not self.form(instance, slot):
                    break

    def has_work(self, i: Instance) -> bool:
        central = self.prompts or self.handoffs
        return bool(i.waiting or i.loaded or i.partial or central)

    def head(self, i: Instance, is_sorted: bool = True) -> tuple[deque[Request], Request] | None:
        if i.waiting:
            if is_sorted:
                i.sort_waiting(self.now)
            return i.waiting, i.waiting[0]
        if i.role != "prefill" and self.handoffs and i.fits(self.handoffs[0]):
            return self.handoffs, self.handoffs[0]
        if i.role != "decode" and self.prompts and i.fits(self.prompts[0]):
            return self.prompts, self.prompts[0]
        return None

    def pop(self, i: Instance, queue: deque[Request]) -> Request:
        request = queue.popleft()
        if queue is i.waiting:
            i.sorted = max(i.sorted - 1, 0)
            i.late = [each for each in i.late if each is not request]
            return request
        if i.role == "prefill":
            request.prefill = i
        else:
            request.decode = i
        if queue:
            self.announce(queue is self.handoffs)
        elif self.prompts:
            # Mixed instances take prompts once no handoffs wait.
            self.announce(False)
        return request

    def form(self, i: Instance, slot: Slot) -> bool:
        begin = max(self.now, i.stage_free[0]) if len(i.slots) > 1 else self.now
        self.begin = begin
        self.chunks: list[PromptChunk] = []
        self.singles: list[int] = []
        self.begun: list[int] = []
        slot.decoding, slot.prompts = [], []
        vllm = i.engine.batching is Batching.VLLM
        (self.gather_chunks if vllm else self.gather_whole)(i, slot)
        self.release_ended(i)
        contexts = [r.todo for r in slot.decoding] + self.singles
        if not contexts and not self.chunks:
            return False
        if self.defers_free(i):
            self.admit_ahead(i, slot)
        self.start(i, slot, contexts)
        return True

    def start(self, i: Instance, slot: Slot, contexts: list[int]) -> None:
        timing = i.engine.timing
        ms = self.predict_ms(i, contexts)
        transfer = self.fleet.transfer
        if self.begun:
            ms += transfer.receiver_ms + transfer.receiver_token_ms * sum(self.begun)
        tokens = sum(c.end - c.start for c in self.chunks) + len(contexts)
        hop = timing.hop_ms + timing.hop_token_ms * tokens if timing.stages > 1 else 0.0
        stage = (ms - (timing.stages - 1) * hop) / timing.stages
        at = self.begin
        for place in range(timing.stages):
            last = place == timing.stages - 1
            at = max(at, i.stage_free[place]) + stage + (0 if last else hop)
            i.stage_free[place] = at
        slot.finish = at
        slot.in_flight = True
        slot.begin = self.begin
        i.flight.append(slot)
        i.busy += stage + (hop if timing.stages > 1 else 0)
        i.intervals.append((self.begin, at))
        i.iterations += 1
        i.batch_peak = max(i.batch_peak, len(contexts))
        for request in slot.decoding:
            if math.isnan(request.decode_start):
                request.decode_start = self.begin
        if i.engine.ranks == 1:
            self.at(at, ITERATION, i)

    def predict_ms(self, i: Instance, contexts: list[int]) -> float:
        timing = i.engine.timing
        return timing.predict_iteration_ms(self.chunks, len(contexts), sum(contexts))

    def tokens(self, slot: Slot) -> int:
        return sum(c.end - c.start for c in self.chunks) + len(self.singles) + len(slot.decoding)

    def gather_chunks(self, i: Instance, slot: Slot) -> None:
        engine = i.engine
        while True:
            is_again = i.scheduled >= self.now
            has_enough = self.grow(i, slot)
            has_enough = self.continue_prompt(i, slot) and has_enough
            if has_enough or (is_again and not self.tokens(slot)):
                while (
                    self.tokens(slot) < engine.max_num_batched_tokens
                    and i.running < engine.max_num_seqs
                    and self.admit_next(i, slot)
                ):
                    pass
            if is_again or self.tokens(slot):
                return
            i.scheduled = self.now
            self.release_ended(i)

    def admit_next(self, i: Instance, slot: Slot) -> bool:
        if any(each.queued <= i.scheduled for each in i.loaded):
            self.join(i, slot)
            return True
        found = self.head(i)
        if not found:
            return False
        queue, request = found
        if request.remote and i.scheduled < self.now:
            return False
        if not request.remote and request.queued > i.scheduled:
            return False
        budget = i.engine.max_num_batched_tokens - self.tokens(slot)
        cached = i.size * len(i.find_cached(request))
        count = request.todo if request.remote else min(request.todo, cached + budget)
        reserved = self.count_reserved(i) if request.remote else 0
        if not self.has_room(i, slot, request, request.todo, reserved):
            return False
        self.pop(i, queue)
        if request.remote:
            self.pull(i, request)
        else:
            i.running += 1
            self.compute(i, slot, request, count - cached)
        return True

    def gather_whole(self, i: Instance, slot: Slot) -> None:
        policy = i.engine.batching
        first = policy in (Batching.PREFILL_FIRST, Batching.LIGHTLLM)
        if first:
            self.admit_prompts(i, slot)
            if self.chunks:
                return
        has_enough = self.grow(i, slot)
        if slot.decoding and (policy is Batching.FASTER_TRANSFORMER or not has_enough):
            return
        while i.loaded and i.running < i.engine.max_num_seqs:
            self.join(i, slot)
        if not first:
            self.admit_prompts(i, slot)
            while i.loaded and i.running < i.engine.max_num_seqs:
                self.join(i, slot)

    def admit_prompts(self, i: Instance, slot: Slot) -> None:
        engine = i.engine
        limited = engine.batching in (Batching.PREFILL_FIRST, Batching.LIGHTLLM)
        while i.running < engine.max_num_seqs:
            found = self.head(i)
            if not found:
                break
            queue, request = found
            cached = i.size * len(i.find_cached(request))
            together = sum(c.end - c.start for c in self.chunks) + request.todo - cached
            too_many = limited and self.chunks and together > engine.max_num_batched_tokens
            if not request.remote and too_many:
                break
            if not self.has_room(i, slot, request, request.todo):
                break
            self.pop(i, queue)
            if request.remote:
                self.pull(i, request)
            else:
                i.running += 1
                self.compute(i, slot, request, request.todo - cached)

    def has_room(
        self, i: Instance, slot: Slot, request: Request, tokens: int, reserved: int = 0
    ) -> bool:
        shared = sum(block.owners > 0 for block in i.find_cached(request))
        if i.count(tokens) + reserved - shared > i.free:
            return False
        if request.prefill is i:
            return True
        if i.engine.batching is Batching.LIGHTLLM:
            others = [(r.todo, r.left) for r in slot.members + slot.prompts]
            return find_peak([*others, (request.todo, request.left)]) <= i.total * i.size
        if i.engine.admission is Admission.WITHIN_TPOT:
            return i.keeps_tpot(request, slot, self.now)
        free, capacity = i.free * i.size, i.total * i.size
        if i.engine.admission is Admission.RESERVE_STATIC:
            return request.todo + request.predict_remaining(capacity) - 1 <= free
        if i.engine.admission is Admission.RESERVE_DYNAMIC:
            members = [r.predict_remaining(capacity) for r in slot.unended]
            steps = min([request.predict_remaining(capacity) - 1, *members])
            return request.todo + (len(members) + 1) * steps <= free
        return True

    def join(self, i: Instance, slot: Slot) -> None:
        request = next(each for each in i.loaded if each.queued <= i.scheduled)
        i.loaded.remove(request)
        i.pulling -= 1
        i.running += 1
        if request.is_whole:
            left = i.engine.max_num_batched_tokens - self.tokens(slot)
            self.compute(i, slot, request, min(request.todo - request.computed, left))
            return
        i.cache_prompt(request, request.prompt)
        request.member_number = next(self.numbers)
        slot.members.append(request)
        slot.decoding.append(request)

    def compute(self, i: Instance, slot: Slot, request: Request, count: int) -> None:
        request.joined = request.todo
        if request.computed == 0 and not request.is_whole:
            request.computed = i.take_cached(request, self.now)
            if request.preemptions == 0:
                request.cached = request.computed
        start, end = request.computed, request.computed + count
        i.take(request, end, self.now)
        i.cache_prompt(request, end)
        i.keep(request, end, self.now)
        if math.isnan(request.prefill_start):
            request.prefill_start = self.begin
        if count == 1 and i.engine.batching is Batching.VLLM:
            self.singles.append(end)
        else:
            self.chunks.append(PromptChunk(start, end))
        i.prompt_tokens += count
        request.computed = end
        if end == request.todo:
            request.is_whole = False
            request.member_number = next(self.numbers)
            slot.prompts.append(request)
        else:
            i.partial = request

    def complete(self, i: Instance, slot: Slot) -> None:
        slot.in_flight = False
        if i.schedules_ahead:
            i.scheduled = slot.begin
        i.decode_iterations += bool(slot.decoding)
        for request in slot.decoding:
            i.keep(request, request.todo, self.now)
        for request in slot.decoding:
            request.token_times.append(self.now)
            i.decode_tokens += 1
            if request.generated == request.output:
                self.leave(i, slot, request)
        for request in slot.prompts:
            self.end_prompt(i, slot, request)
        slot.prompts = []
        slot.members.sort(key=lambda each: each.member_number)

    def leave(self, i: Instance, slot: Slot, request: Request) -> None:
        self.finish(request, self.now)
        i.ended.append(request)
        if not i.schedules_ahead:
            self.release_ended(i)

    def release_ended(self, i: Instance) -> None:
        """An engine that schedules ahead knows of them after it has scheduled the next one."""
        for request in i.ended:
            self.release(i, request)
        i.running -= i.handed_over
        i.ended, i.handed_over = [], 0
        self.release_sent(i)

    def release(self, i: Instance, request: Request, is_preempted: bool = False) -> None:
        for slot in i.slots:
            slot.members = [each for each in slot.members if each is not request]
        i.running -= 1
        i.drop(request, self.now, is_preempted)

    def finish(self, request: Request, now: float) -> None:
        request.end = now
        if request.decode and not self.fleet.defers_dispatch:
            request.decode.resident_tokens -= request.prompt + request.predicted

    def end_prompt(self, i: Instance, slot: Slot, request: Request) -> None:
        if math.isnan(request.prefill_end):
            request.prefill_end = self.now
            if not self.fleet.defers_dispatch:
                i.answer(request.prompt, self.now)
        if request.prefill is i:
            by_decode = self.of("decode", "mixed") and self.fleet.first_token_by_decode
            if not by_decode:
                request.token_times.append(self.now)
            if request.generated == request.output or not self.of("decode", "mixed"):
                slot.members.append(request)
                self.leave(i, slot, request)
                return
            i.handed_over += 1
            if not i.schedules_ahead:
                self.release_ended(i)
            request.remote = True
            request.held_by_source, request.held = request.held, []
            request.blocks = request.kv = request.computed = 0
            self.at(self.now + self.fleet.dispatch_ms, HANDOFF, request)
            return
        request.token_times.append(self.now)
        if not request.prefill and math.isnan(request.transfer_start):
            request.transfer_start = request.transfer_end = self.now
        slot.members.append(request)
        if request.generated == request.output:
            self.leave(i, slot, request)
