"""The state of a running simulation, as flat arrays of records.

Used only by the compiled modules of this package. Numba compiles fast, and its code runs fast, only
with few simple types. So there is one record type per entity, a reference is a row number, and a
list is a chain of row numbers that ends with NONE.

Names in all modules of this package: `r` is the row of a request, `i` of an instance, `s` of a slot
(one micro-batch of an instance); `request`, `inst` and `slot` are these records, `state` the STATE.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.policy.role_flipping import DECODE as DECODE
from cleave.policy.role_flipping import MEMBER as MEMBER
from cleave.policy.role_flipping import MIXED as MIXED
from cleave.policy.role_flipping import PREFILL as PREFILL
from cleave.policy.role_flipping import PRESSURE_HISTORY as PRESSURE_HISTORY

NONE = -1
"""No row."""

PENDING_PROMPT, ROOM, HEAVINESS, FULLNESS, HEADROOM, NUM_COLUMNS = 3, 4, 5, 6, 7, 8
"""Columns of scores after TO_PREFILL, TO_DECODE and TO_WHOLE of `policy.dispatch`."""

LEFT_OUT = 1 << 60
"""`end_step` of a member that is left out of an iteration."""

NOTHING, SENT, CACHED = 0, 1, 2
"""What dispatch knows of caches, `fleet.CacheView`."""

HANDOFFS, PROMPTS = 1, 2
"""Bit flags: which central queues have a new head."""

Record = Any
"""A row of one of the arrays below; compiled code reads and writes its fields."""

Records = NDArray[np.void]


def _build_dtype(floats: str, integers: str) -> np.dtype[np.void]:
    fields = [(name, np.float64) for name in floats.split()]
    return np.dtype(fields + [(name, np.int64) for name in integers.split()])


REQUEST = _build_dtype(
    # queued: when it reached the instance, or when its KV did. prompts_before: its decode
    # instance's computed_tokens when it began to decode. last_token: when its latest token came, as
    # long as it decodes nowhere; valid if it has generated one.
    "arrival prefill_start prefill_end transfer_start transfer_end decode_start first_token end "
    "queued prompts_before last_token",
    # generated: output tokens generated when the request last joined a batch or a queue.
    # to_compute, computed: tokens whose KV has to be computed (again after a preemption), and those
    # computed so far. is_pulled: its KV has not arrived from a prefill instance yet. end_step:
    # the step of its slot after which it ends. next: link in a queue, or in a slot's list of
    # prompts; older, younger: links among members. predicted: output tokens that dispatch and
    # admission assume. next_assigned, previous_assigned: links in the decode instance's list of
    # assigned requests. left: full KV blocks that it left in the cache of its instance when it was
    # preempted; left_until: `cached` of the instance then. pull_order: number of its pull, in order
    # of their begin. next_sent: link in the list of its prefill instance. is_whole: its instance
    # has allocated blocks for all of the prompt that it computes.
    "predicted next_assigned previous_assigned "
    "prompt output generated to_compute computed is_pulled end_step next older younger "
    "prefill decode preemptions outcome left left_until pull_order next_sent is_whole",
)
"""One request. Times in ms, nan until reached."""

PROMPT = _build_dtype(
    "",
    # first_block, num_blocks: its part of `blocks`. uncached: prompt tokens that the router expects
    # to be computed. hit, pull_hit: tokens found in the cache of the instance that computed it, and
    # of the one that pulled it. found, shared: blocks that the latest search has found, and KV
    # blocks of these that other requests hold. held_prefill, held_decode: number of copies held.
    # first_answer, num_answers: the answer's part of `answers`. known: leading blocks that any
    # instance is known to cache. source: the instance whose cache has what is missing of its
    # beginning; NONE: that is computed. is_pulled: dispatch expects that some is pulled from there.
    # fetched: tokens that were.
    # loaded: tokens that were copied back from host memory; to_load: that dispatch expects to be.
    # own: the copy of what follows the blocks that it held when it was preempted, which were
    # own_after; own_found: KV blocks of it that the latest search has found.
    "first_block num_blocks uncached hit pull_hit found shared held_prefill held_decode "
    "first_answer num_answers known source is_pulled fetched loaded to_load own own_after "
    "own_found",
)
"""What caches have to do with one request; only with a trace whose prompts repeat."""

CACHE = _build_dtype(
    # written: tokens of KV written so far, as far as the router knows; stored: those of them that
    # were copied to host memory. horizon: `written` before which it has evicted what it had, as the
    # router knows from its reports; reported: the oldest use of a copy in the latest one, ms.
    "written stored horizon reported",
    # size: KV blocks that are cached and held by no request; oldest, newest: ends of the list of
    # their copies; evicted: copies evicted so far. first_used, last_used: ends of the list of
    # blocks that the router knows to be cached, by use; first_begun, last_begun: of all copies.
    "size oldest newest evicted first_used last_used first_begun last_begun",
)
"""The prefix cache of an instance, or the cache in its host memory (see `cached_copies`)."""

COPY = _build_dtype(
    # used: when a request began to use it, ms.
    "used",
    # block: its number in the trace; NONE: content that no prompt has; below: see `mark_own`. size:
    # KV blocks. owners: requests that hold it. older, younger: links among copies without owners.
    # before, after: among all copies of its cache, by `used`. next: link among the copies of its
    # block on all instances.
    "block instance size owners older younger before after next",
)
"""One cached copy of a block on an instance, see `prefix_caches`."""

KNOWN = _build_dtype("written", "block instance older younger next")
"""A block that the router knows to be cached on an instance. written: tokens written there before
its latest use. Links as in COPY."""

QUEUE = _build_dtype("", "head tail size")
"""Requests linked by `next`."""

SLOT = _build_dtype(
    # A leap is a series of decode iterations that is simulated in one event.
    # first, change: ms of the leap's first iteration, and by how much each later one is longer.
    # pulls: ms by which transfers that begin with the iteration lengthen it.
    # decoded: end of the latest iteration in which members take part.
    "begin finish first change pulls decoded",
    # batch, context: members, and the sum of their contexts in the next decode iteration.
    # steps: decode iterations completed; iterations: iterations in flight (0: the slot is idle).
    # decodes: whether members take part; oldest, youngest: ends of the list of members.
    # first_prompt, last_prompt: ends of the list of prompts that end in the iteration.
    # fresh: list of the members that have not decoded yet; next: the slot that started after it.
    # left_out: members that the iteration leaves out, for want of blocks.
    # tokens, squares, rows, contexts: what the iteration computes.
    "batch context steps iterations decodes oldest youngest first_prompt fresh next "
    "last_prompt tokens squares rows contexts left_out",
)
"""One micro-batch of an instance; an instance has as many slots as pipeline stages."""

INSTANCE = _build_dtype(
    # Constants of the engine:
    "prompt_step prompt_square hop hop_token host_token "
    # next, wake: time of its next event and of the wake-up of an idle slot; link: when its link is
    # free, inbound: when it can receive another prefix, host_link: when another one can be copied
    # back from host memory; pending_prompt_tokens, resident_tokens, computed_tokens (of all prompts
    # so far): the router's accounting, in tokens; kv_weight: its `compute_kv_weight`;
    # sum_*, *_ms: its `policy.queue_model.PrefillQueueModel`; kv_at, kv_area: integral of KV use.
    # scheduled: when the next iteration was scheduled; inf: it will be when it starts.
    "next wake scheduled link inbound host_link pending_prompt_tokens resident_tokens kv_weight "
    "weighted_context computed_tokens head_started_ms prompt_ms token_ms upper_token_ms "
    "sum_iterations sum_prompts sum_tokens sum_inverses sum_ms sum_rates sum_squares "
    "sum_last_tokens sum_last_ms last_pick "
    # ttft_ms, tpot_ms: targets of IN_TIME and WITHIN_TPOT.
    "ttft_ms tpot_ms "
    "kv_at kv_area busy",
    # requests: dispatched and not ended; waiting: those whose prompt is not computed; num_assigned:
    # those that decode there, heavy: with long outputs; first_assigned: head of their list.
    # host_blocks: KV blocks that fit in its host memory; host_tokens: the same in tokens, as far as
    # the router knows.
    "requests waiting heavy num_assigned first_assigned host_blocks host_tokens "
    "role batching order admission block blocks max_seqs max_tokens sched_batch stages reserve "
    "schedules_ahead prompt_table prompt_points decode_table decode_points context_table "
    "context_points mixed_table mixed_points "
    # first_rank, ranks: the data-parallel ranks that compute in step with it, itself among them.
    "first_rank ranks "
    # first_slot: row of its first slot; oldest, newest: ends of the list of slots in flight.
    # partial: the prompt that is partly computed; window: number of prompts already sorted.
    # pulling: requests with blocks here whose KV is on its way or that are to join when it is here.
    # late: number of requests at the end of its queue that IN_TIME has deferred; last_in_time: the
    # last request before them, NONE if there is none. first_ended, last_ended: ends of the list of
    # requests that have ended but still hold blocks and a seat, num_ended: those that hold a seat;
    # first_sent, last_sent: of those whose KV was pulled and still hold blocks. defers_free: with a
    # KV connector an engine that schedules ahead preempts nobody whose iteration runs; ahead:
    # blocks that the iteration after the one in flight has taken already.
    # caches: whether it has a prefix cache. cached, evicted: KV blocks that were left there and not
    # found again, and those of them that were evicted; counted only if prompts do not repeat.
    "first_slot in_flight oldest newest partial free running pulling window late last_in_time "
    "first_ended last_ended num_ended first_sent last_sent defers_free ahead caches cached evicted "
    "kv_tokens kv_peak iterations decode_iterations batch_peak running_peak "
    "prompt_tokens decode_tokens preemptions",
)
"""One instance."""

PULL = _build_dtype("time", "request")
"""A KV transfer in progress; the array is a heap by (time, `pull_order`)."""

NUMBER = _build_dtype("", "value")
TIME = _build_dtype("value", "")

STATE = _build_dtype(
    # next_flip_check: ms of the next role-flip check, inf: roles are fixed. wait_ms to idle_ms,
    # min_prefill, min_decode: the FlipThresholds. headroom_ms: `FlipThresholds.headroom_ms`.
    # itl_begin, itl_end: tokens that come then count in `itl_counts`.
    "dispatch_ms latency token overlapped_token receiver receiver_token now "
    "k1 c1 k2 c2 c3 ttft_ms tpot_ms gamma theta next_flip_check wait_ms rise_ms calm_ms "
    "idle_ms headroom_ms max_ttft max_tpot itl_begin itl_end",
    # counts, *_pick: the rule of policy.dispatch; is_by_score: whether it picks the least score;
    # is_deferred: whether requests wait in central queues instead; offered: central queues with a
    # new head; is_predicted: outputs are predicted, not known. first_counted, end_counted: rows of
    # the requests that count for an early verdict; counted_left: those that have not ended;
    # misses_left: those that may still exceed max_ttft or max_tpot.
    "short_prompt_tokens counts prefill_pick decode_pick is_by_score is_deferred "
    "overlap_from is_shared is_predicted first_by_decode has_prefill "
    "has_decode random num_picks num_pulls pull_order offered events max_events "
    "num_arrived num_delivered num_requests num_instances num_leaves heap_size max_block "
    "max_stages min_prefill min_decode num_flips first_counted end_counted counted_left "
    "misses_left "
    # block_tokens: tokens per block of the trace; num_block_uses: length of `blocks`. cache_view:
    # what dispatch knows of caches, NOTHING unless its policy uses it.
    # num_copies, num_known: rows used so far; free_copy, free_known: lists of rows to use again.
    # pulls_prefixes: whether prompts may pull their beginning from another instance's cache.
    "block_tokens num_block_uses cache_view num_copies free_copy num_known free_known "
    "pulls_prefixes "
    # Addresses of arrays. queues: waiting by instance; loaded by instance; handoffs in delivery;
    # then, with deferred dispatch, waiting handoffs and prompts. heaps (slot, heap_size):
    # `end_step << 32 | request` of the members, a binary heap. phases (slot, max_block): members by
    # when they next need a block, see `kv_blocks`. stages (instance, max_stages): when each is
    # free. tables: points of all latency models. scores (column, instance): what policy.dispatch
    # compares. tree: tournament over the instances' next events, the winner at 1, instance i at
    # num_leaves + i. scratch: two numbers for each request and one more.
    # members, pressure_history: input of policy.role_flipping. itl_counts: by bin, see
    # `inter_token_latency`.
    # blocks: numbers of the blocks of all prompts; first_copies, first_known: heads of the lists of
    # a block's copies and KNOWN; held: copies that requests hold for `blocks`, first on prefill,
    # then on decode instances. answers: numbers of the blocks of all answers. clocks: by instance,
    # the history of `written`, see policy.cache_horizon.
    "clocks prompts caches blocks answers copies first_copies held known first_known "
    "requests instances slots queues heaps phases stages tables scores tree pulls scratch members "
    "pressure_history itl_counts",
)
"""All state of one simulation."""

State = Record
"""The row of STATE."""
