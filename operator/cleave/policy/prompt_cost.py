"""Where a prompt costs least, in ms: the predicted wait, copying back what is cached in host memory
there, and computing what is not cached.

Called by the router, and by the simulator, which compiles it. What is hard: a cached prefix must
attract prompts, but not all of them. In one unit both follow from the cost: while a queue takes
longer than recomputing the prefix elsewhere, the prompt goes elsewhere, and from then on the prefix
is cached there, too. And the search must not look at every instance for every block: it stops where
no other instance can cost less.

Sources: Mooncake's Conductor adds up the queue and the prefill of what is not cached (FAST 2025,
cache-aware scheduling); Preble weighs reuse against load in one cost (ICLR 2025, E2). The wait here
is that of `policy.queue_model`.
"""

import math

from cleave.policy.dispatch import NONE, RESIDENT_WEIGHT, Scores

MAX_COMPARED = 16
"""Most comparisons of one search, after the first instance."""


class PromptView:
    """One prompt, and what is known of the instances that may compute it; the router's implements
    it. The simulator has functions in place of the methods, which take its state and a request."""

    __slots__ = ()

    def find_depth(self, request: int, purpose: int, slot: int) -> int:
        """Number of leading blocks of the prompt that the instance has cached."""
        raise NotImplementedError

    def find_holder(self, request: int, purpose: int, depth: int, after: int) -> int:
        """The next open instance that has cached the first `depth` blocks, as a number for
        `get_holder`; `after`: the one before, NONE at first. NONE: there are no more. If there are
        too many to list, the first one of the search is among them if it has cached so much."""
        raise NotImplementedError

    def get_holder(self, handle: int) -> int:
        """The slot of an instance from `find_holder`."""
        raise NotImplementedError

    def has_load(self, request: int, slot: int, depth: int) -> bool:
        """Whether some of these first `depth` blocks are in host memory only at the instance that
        `find_holder` has found last."""
        raise NotImplementedError

    def predict_at(self, request: int, purpose: int, slot: int, depth: int) -> float:
        """`predict_cost_ms` of the prompt there, if its first `depth` blocks are cached."""
        raise NotImplementedError

    def predict_bound(self, request: int, purpose: int, least: int, depth: int) -> float:
        """Lower bound of `predict_at` of all instances if they have cached so much; `least`: the
        slot with the shortest wait."""
        raise NotImplementedError


def find_depth(view: PromptView, request: int, purpose: int, slot: int) -> int:
    """Of the view; as the next five, replaced in compiled code: see `dispatch.find_for`."""
    return view.find_depth(request, purpose, slot)


def find_holder(view: PromptView, request: int, purpose: int, depth: int, after: int) -> int:
    """Of the view."""
    return view.find_holder(request, purpose, depth, after)


def get_holder(view: PromptView, handle: int) -> int:
    """Of the view."""
    return view.get_holder(handle)


def has_load(view: PromptView, request: int, slot: int, depth: int) -> bool:
    """Of the view."""
    return view.has_load(request, slot, depth)


def predict_at(view: PromptView, request: int, purpose: int, slot: int, depth: int) -> float:
    """Of the view."""
    return view.predict_at(request, purpose, slot, depth)


def predict_bound(view: PromptView, request: int, purpose: int, least: int, depth: int) -> float:
    """Of the view."""
    return view.predict_bound(request, purpose, least, depth)


def find_cheapest(
    view: PromptView, request: int, purpose: int, first: int, least: int, depth: int
) -> int:
    """The slot at which the prompt costs least.

    Compared are `first` and instances that have cached more of the prompt than the least one, those
    that have cached most first. `least`: the slot with the shortest wait, which is `first` unless a
    session or an adapter is pinned there. `depth`: leading blocks of the prompt that any instance
    may have cached.
    """
    best, lowest_ms, compared = first, math.inf, 0
    is_pinned = first != least
    if is_pinned:
        known = find_depth(view, request, purpose, first)
        lowest_ms = predict_at(view, request, purpose, first, known)
    while depth > 0 and compared < MAX_COMPARED:
        deeper, deeper_ms = best, lowest_ms
        holder = find_holder(view, request, purpose, depth, NONE)
        while holder != NONE and compared < MAX_COMPARED:
            slot = get_holder(view, holder)
            cost_ms = predict_at(view, request, purpose, slot, depth)
            if slot == least and not is_pinned and not has_load(view, request, slot, depth):
                # Others that have no more of it have a longer wait as well.
                return first if cost_ms <= deeper_ms else deeper
            if cost_ms < lowest_ms:
                best, lowest_ms = slot, cost_ms
            compared += 1
            holder = find_holder(view, request, purpose, depth, holder)
        depth -= 1
        if lowest_ms < predict_bound(view, request, purpose, least, depth):
            return best
    if is_pinned:
        return best
    known = find_depth(view, request, purpose, first) if depth > 0 else 0
    return first if predict_at(view, request, purpose, first, known) <= lowest_ms else best


def predict_cost_ms(
    wait_ms: float, uncached_tokens: float, prompt_ms: float, token_ms: float, load_ms: float
) -> float:
    """ms until a prompt is computed: the wait before it, `load_ms` to copy back what is in host
    memory, and its time as the instance's queue model states it, `prompt_ms` for the prompt and
    `token_ms` for each of its `uncached_tokens`.

    `token_ms` is the upper estimate: the lower one is 0 where times do not follow the tokens, so
    that everything there would seem to cost nothing.
    """
    return wait_ms + load_ms + prompt_ms + max(uncached_tokens, 0.0) * token_ms


def predict_queue_ms(end_ms: float, pending: float, now_ms: float, token_ms: float) -> float:
    """ms until the queue of a prefill instance with `pending` tokens ends, which was predicted for
    `end_ms` of the clock that says `now_ms`.

    Of an overdue queue the time until its end is not known. If it counted as none, an instance that
    is late, or has stopped, would attract all that it has cached.
    """
    return max(end_ms - now_ms, pending * token_ms)


def count_mixed(pending: float, total: float) -> float:
    """Tokens before a new prompt on a mixed instance, where prompts and decoding alternate. Of its
    `total` tokens, `pending` ones wait; the others are resident, lengthen the iterations that
    compute the prompt, and count as much as in comparisons of cells (`RESIDENT_WEIGHT`). So the
    least score, in which both count alike, is not the shortest wait."""
    return pending + RESIDENT_WEIGHT * (total - pending)


def count_all_mixed(pending: Scores, total: Scores) -> Scores:
    """`count_mixed` of all instances."""
    counted: Scores = pending + RESIDENT_WEIGHT * (total - pending)
    return counted
