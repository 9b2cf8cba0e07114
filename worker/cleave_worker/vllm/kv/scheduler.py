"""The scheduler's half of the connector: which prompts are held, pulled or declined.

Runs in vLLM's scheduler, between steps. Prefill memory is the queue: a finished prefill keeps its
blocks until a decode engine, whenever it has room, has pulled them or the lease ends. What is hard:
vLLM tells of a request's end in several ways, and each of them must free the other side's blocks.
"""

import itertools
from typing import Any

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from cleave_worker.transfer.holds import Begun, Held
from cleave_worker.transfer.identity import HandOff, Reason, prompt_digest
from cleave_worker.transfer.shapes import Shape
from cleave_worker.vllm.kv.metrics import Transfers
from cleave_worker.vllm.kv.orders import Orders, Wanted
from cleave_worker.vllm.kv.running import Running

KEY = "cleave"
"""Of a hand-off in vLLM's kv_transfer_params."""
_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """One engine's."""

    def __init__(
        self,
        boot_id: str,
        block_size: int,
        shape: Shape,
    ) -> None:
        """`shape`: of this engine."""
        self._boot_id = boot_id
        self._block_size = block_size
        self._shape = shape
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._epochs = itertools.count(1)
        self._running = Running(block_size)
        self._coming: dict[str, HandOff] = {}
        self._orders = Orders()
        self._transfers = Transfers()

    def locate(self, addresses: tuple[tuple[str, int], ...]) -> None:
        """Where the ranks serve, in their order: known once they have started.

        They are told, for a decode engine that is promised a prefill knows rank 0 only.
        """
        self._addresses = self._orders.addresses = addresses

    def on_new_request(self, request: Request) -> None:
        """Read the hand-off that came with a request: the owner hears from us until the end.

        Or the name by which a decode engine that was asked already will follow the request.
        """
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self._begin(request, params)
            return
        if not params or not params.get("do_remote_prefill"):
            return
        hand_off = _read(params)
        if (
            hand_off is None
            or (not hand_off.ahead and hand_off.num_tokens < request.num_prompt_tokens)
            or request.prompt_token_ids is None
        ):
            params["do_remote_prefill"] = False
            self._transfers.refused(Reason.MALFORMED)
            return
        self._coming[request.request_id] = hand_off
        self._orders.expect[request.request_id] = hand_off

    def tokens_to_pull(self, request: Request, num_computed_tokens: int) -> int:
        """Of the prompt, beyond what the prefix cache has."""
        if request.request_id not in self._coming:
            return 0
        prompt_tokens: int = request.num_prompt_tokens
        return max(0, prompt_tokens - num_computed_tokens)

    def allocated(self, request: Request, blocks: list[Any], num_external_tokens: int) -> None:
        """The request has blocks: pull into those that the prefix cache does not know."""
        hand_off = self._coming.pop(request.request_id, None)
        if hand_off is None:
            return
        # Once only: if the pull fails the prompt is computed here.
        request.kv_transfer_params["do_remote_prefill"] = False
        if not num_external_tokens:
            self._orders.decline[request.request_id] = hand_off
            return
        first = (request.num_prompt_tokens - num_external_tokens) // self._block_size
        last = -(-request.num_prompt_tokens // self._block_size)
        self._orders.pull[request.request_id] = Wanted(
            hand_off,
            _digest(request),
            first,
            tuple(block.block_id for block in blocks[first:last]),
        )

    def finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """(whether the blocks are kept, the hand-off for the answer)."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        hand_off = self._coming.pop(request.request_id, None)
        if hand_off is not None:
            # It ends before its turn has come.
            self._orders.decline[request.request_id] = hand_off
        num_blocks = self._count_blocks(request)
        begun = self._running.end(request.request_id)
        if (
            not params.get("do_remote_decode")
            or request.status not in _FINISHED
            or len(block_ids) < num_blocks
            # A prompt of embeddings has no tokens to know it by.
            or request.prompt_token_ids is None
            # Who followed it has been told that it is lost, and nobody else knows of it.
            or (begun is None and _name(params))
        ):
            if begun:
                self._orders.give_up.add(request.request_id)
            return False, None
        epoch = begun.epoch if begun else next(self._epochs)
        held = Held(epoch, _digest(request), tuple(block_ids[:num_blocks]))
        self._orders.hold[request.request_id] = held
        return True, self._params(request, held)

    def take_orders(self, output: SchedulerOutput | None = None) -> Orders:
        """What has changed since the last step, and what the next one computes (`output`)."""
        orders, self._orders = self._orders, Orders()
        if output is not None:
            orders.compute, lost = self._running.step(output)
            orders.give_up |= lost
        return orders

    def take_transfers(self) -> Transfers:
        """What the scheduler itself has refused since the last step."""
        return self._transfers.clone_and_reset()

    def _begin(self, request: Request, params: dict[str, Any]) -> None:
        name = _name(params)
        if not name or request.prompt_token_ids is None:
            return
        begun = Begun(next(self._epochs), _digest(request), self._count_blocks(request), name)
        self._running.begin(request.request_id, begun, request.num_prompt_tokens)
        self._orders.begin[request.request_id] = begun

    def _count_blocks(self, request: Request) -> int:
        count: int = -(-request.num_prompt_tokens // self._block_size)
        return count

    def _params(self, request: Request, held: Held) -> dict[str, object]:
        hand_off = HandOff(
            self._boot_id,
            request.request_id,
            held.epoch,
            held.prompt_digest,
            request.num_prompt_tokens,
            self._addresses,
            self._shape,
        )
        # As vLLM's own connector writes it, for whoever reads hand-offs of any kind.
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(held.blocks)],
            "remote_engine_id": self._boot_id,
            "remote_request_id": request.request_id,
            "remote_host": self._addresses[0][0],
            "remote_port": self._addresses[0][1],
            "tp_size": self._shape.tensor_parallel_size,
            "pp_size": len(self._shape.stages),
            "remote_num_tokens": request.num_prompt_tokens,
            "transfer_mode": "pull",
            KEY: msgspec.to_builtins(hand_off),
        }


def _name(params: dict[str, Any]) -> str:
    """By which a prefill may be followed; empty: it may not."""
    own = params.get(KEY)
    name = own.get("name") if isinstance(own, dict) else None
    return name if isinstance(name, str) else ""


def _read(params: dict[str, Any]) -> HandOff | None:
    try:
        hand_off = msgspec.convert(params.get(KEY), HandOff)
    except msgspec.ValidationError:
        return None
    named = (params.get("remote_engine_id"), params.get("remote_request_id"))
    # Two halves of different hand-offs are none.
    return hand_off if named == (hand_off.boot_id, hand_off.request_id) else None


def _digest(request: Request) -> str:
    """Of what decides the KV of a request's prompt, as vLLM's prefix cache sees it."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = ",".join(
        f"{one.identifier}@{one.mm_position.offset}" for one in request.mm_features or ()
    )
    return prompt_digest(
        (request.prompt_token_ids or ())[: request.num_prompt_tokens],
        f"{adapter}|{request.cache_salt or ''}|{media}",
    )
