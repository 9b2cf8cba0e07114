"""The part of the reference simulator that decides who has blocks for the next iteration, and which
pulls begin while it is scheduled ahead."""

import itertools
import math

from cleave.simulator.fleet import SimulatedFleet

from tests.support.reference_simulator_state import Instance, Request, Slot


class Blocks:
    now: float
    fleet: SimulatedFleet
    numbers: "itertools.count[int]"

    def may_preempt(self, i: Instance, request: Request) -> bool:
        """With a KV connector nobody whose iteration is in flight."""
        return not self.defers_free(i) or i.scheduled >= self.now or request.left_out

    def defers_free(self, i: Instance) -> bool:
        return i.schedules_ahead and self.fleet.has_connector

    def grow(self, i: Instance, slot: Slot) -> bool:
        """Blocks for the next token of each member; False: some were preempted."""
        has_enough, order = True, [each for each in slot.members if math.isnan(each.end)]
        for number, request in enumerate(order):
            if request not in slot.members:
                continue
            missing = i.count(request.todo) - request.blocks
            while missing > i.free and request in slot.members:
                last = i.partial or slot.members[-1]
                if not self.may_preempt(i, last):
                    for each in order[number:]:
                        each.left_out = True
                    return has_enough
                has_enough = False
                self.preempt(i, last, slot)
            if request in slot.members:
                request.left_out = False
                i.take(request, request.todo, self.now)
                slot.decoding.append(request)
        return has_enough

    def preempt(self, i: Instance, request: Request, slot: Slot) -> None:
        i.preemptions += 1
        request.preemptions += 1
        if request in i.ended:
            i.ended.remove(request)
            self.release(i, request, True)
            return
        if request is i.partial:
            i.partial = None
        else:
            slot.members.remove(request)
            assert request not in slot.decoding
        i.drop(request, self.now, not self.defers_free(i))
        request.computed = 0
        request.left_out = request.is_whole = False
        i.running -= 1
        i.waiting.appendleft(request)
        i.sorted += 1

    def continue_prompt(self, i: Instance, slot: Slot) -> bool:
        """The next chunk of the partly computed prompt; False: it was preempted."""
        request, left = i.partial, i.engine.max_num_batched_tokens - self.tokens(slot)
        if not request:
            return True
        count = min(request.todo - request.computed, left)
        has_blocks = i.count(request.computed + count) - request.blocks <= i.free
        if count and has_blocks and not any(each.left_out for each in slot.members):
            i.partial, request.left_out = None, False
            self.compute(i, slot, request, count)
        elif count and self.may_preempt(i, request):
            self.preempt(i, request, slot)
            return False
        else:
            request.left_out = True
        return True

    def count_reserved(self, i: Instance) -> int:
        """Blocks that the partly computed prompt will need."""
        return max(i.count(i.partial.todo) - i.partial.blocks, 0) if i.partial else 0

    def count_next(self, i: Instance, slot: Slot) -> tuple[int, int, int]:
        """Tokens and blocks of what runs on in the iteration after the one in flight, and blocks
        reserved beside them; all tokens if it preempts somebody."""
        most, tokens, blocks = i.engine.max_num_batched_tokens, 0, 0
        for r in slot.members + [each for each in slot.prompts if each.prefill is not i]:
            gains = r in slot.decoding or r in slot.prompts
            if math.isnan(r.end) and r.generated + gains < r.output:
                tokens += 1
                blocks += i.count(r.todo + gains) - r.blocks
        if blocks > i.free:
            return most, 0, 0
        if not i.partial or tokens >= most:
            return tokens, blocks, 0
        count = min(i.partial.todo - i.partial.computed, most - tokens)
        more = max(i.count(i.partial.computed + count) - i.partial.blocks, 0)
        if blocks + more <= i.free:
            return tokens + count, blocks + more, 0
        if i.partial.left_out:
            return most, 0, 0
        return tokens, blocks, self.count_reserved(i)

    def admit_ahead(self, i: Instance, slot: Slot) -> None:
        """Pulls that the iteration after the one in flight admits begin now; those who were
        preempted and wait before them get their blocks."""
        behind = [each for each in i.waiting if each.remote or not each.preemptions]
        found = self.head(i, is_sorted=False)
        if i.role == "prefill" or not found or not (behind or [found[1]])[0].remote:
            return
        if i.waiting and not behind:
            return
        most = i.engine.max_num_batched_tokens
        tokens, blocks, reserved = self.count_next(i, slot)
        tokens, seats = tokens + len(i.loaded), i.engine.max_num_seqs - i.running - len(i.loaded)
        for each in i.loaded:
            if tokens < most and not each.is_whole:
                i.cache_prompt(each, each.prompt)
        i.free -= blocks
        held = i.cache.allocate(blocks)
        while tokens < most and seats > 0 and (found := self.head(i)):
            queue, request = found
            if request.remote:
                if not self.has_room(i, slot, request, request.todo, reserved):
                    break
                self.pop(i, queue)
                self.pull(i, request)
                continue
            tokens += request.todo - i.size * len(i.find_cached(request))
            seats -= 1
            if tokens > most or not self.has_room(i, slot, request, request.todo):
                break
            self.pop(i, queue)
            self.load_whole(i, request)
        i.free += i.cache.release(held, ())

    def load_whole(self, i: Instance, request: Request) -> None:
        """Its blocks are allocated; it joins when the next iteration is formed."""
        i.pulling += 1
        request.pull_number = next(self.numbers)
        request.joined = request.todo
        request.computed = i.take_cached(request, self.now)
        i.take(request, request.todo, self.now)
        i.cache_prompt(request, request.todo)
        request.is_whole, request.queued = True, self.now
        i.loaded.append(request)
        i.loaded.sort(key=lambda each: each.pull_number)
