"""A gateway of your own in small: Cleave's router picks instances, this program calls them.

    python client.py --router chat.default.svc:9003 --cert tls.crt --key tls.key --ca ca.crt \
        --model llama "Once upon a time"

It needs `cleave-serving`, for the messages of cleave.rpc.v1.Router, and `httpx`. A handoff is KV of
the prefill engine; wrong KV gives wrong tokens and no error, so `read_handoff` checks whose it is.
"""

import argparse
import sys
import uuid
from pathlib import Path
from typing import Any

import grpc
import httpx

from cleave.rpc.engine_key import build_headers
from cleave.rpc.v1 import router_pb2, router_pb2_grpc

Body = dict[str, Any]
PATH = "/v1/completions"
ATTEMPTS = 3
TIMEOUT_S = 600.0
UNSPLIT = {"n", "best_of", "echo", "prompt_logprobs", "use_beam_search"}
"""With one of these fields one engine has to compute the whole request."""
DECODE_ONLY = {"stream_options", "min_tokens"}


class EngineError(RuntimeError):
    """An instance has not answered, or not as it should."""

    def __init__(self, instance: str, reason: object) -> None:
        super().__init__(f"instance {instance}: {reason}")
        self.instance = instance


def complete(stub: router_pb2_grpc.RouterStub, http: httpx.Client, request: Body) -> Body:
    """The answer to a completion; other instances are tried where some fail.
    Raises grpc.RpcError when the router has none, and EngineError."""
    failed: list[str] = []
    while True:
        ask = router_pb2.PickRequest(
            model=request["model"],
            prompt_tokens=max(len(request["prompt"]) // 4, 1),
            output_tokens=request.get("max_tokens", 0),
            single_instance=not UNSPLIT.isdisjoint(request),
            avoid=failed,
        )
        # A caller that dies releases nothing: then the load counts until the lease ends.
        pick = stub.Pick(ask, timeout=10)
        try:
            return compute(stub, http, pick, request)
        except EngineError as error:
            failed.append(error.instance)
            if len(failed) == ATTEMPTS:
                raise
        finally:
            stub.Release(router_pb2.ReleaseRequest(ticket=pick.ticket), timeout=10)


def compute(
    stub: router_pb2_grpc.RouterStub,
    http: httpx.Client,
    pick: router_pb2.PickResponse,
    request: Body,
) -> Body:
    """Prefill and decode, or both at once. Raises EngineError."""
    request = {**request, "model": pick.engine_model or request["model"]}
    # New for each attempt: an engine may still have the previous one.
    request_id = uuid.uuid4().hex
    if not pick.HasField("prefill"):
        return post(http, pick.decode, request_id, request)
    prefill = {key: value for key, value in request.items() if key not in DECODE_ONLY}
    prefill |= {"stream": False, "max_tokens": 1}
    prefill["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    first = post(http, pick.prefill, request_id, prefill)
    release = router_pb2.ReleaseRequest(ticket=pick.ticket, phase=router_pb2.PHASE_PREFILL)
    stub.Release(release, timeout=10)
    handoff = read_handoff(first, pick.prefill, request_id)
    if handoff is None:
        return first
    return post(http, pick.decode, request_id, {**request, "kv_transfer_params": handoff})


def read_handoff(answer: Body, prefill: router_pb2.Target, request_id: str) -> Body | None:
    """What the decode engine needs to fetch the KV; None: the first token has ended the answer.
    Raises EngineError when it is of another start of the engine or of another request."""
    handoff: Body | None = answer.get("kv_transfer_params")
    if handoff is None:
        return None
    if handoff["remote_engine_id"] != prefill.boot_id:
        raise EngineError(prefill.instance, "its handoff is of another start")
    if f"-{request_id}-" not in f"{handoff['remote_request_id']}-":
        raise EngineError(prefill.instance, "its handoff is of another request")
    return handoff


def post(http: httpx.Client, target: router_pb2.Target, request_id: str, body: Body) -> Body:
    """An engine's answer. Raises EngineError."""
    headers = {"x-request-id": request_id, **build_headers(target.engine_key)}
    try:
        answer = http.post(target.engine_url + PATH, json=body, headers=headers)
        answer.raise_for_status()
        found: Body = answer.json()
        return found
    except (httpx.HTTPError, ValueError) as error:
        raise EngineError(target.instance, error) from error


def main() -> None:
    """Print the text of one completion."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--router", required=True, metavar="HOST:PORT")
    for flag, text in {
        "--cert": "the certificate that this program shows",
        "--key": "its key",
        "--ca": "the authority that has signed the router's",
    }.items():
        parser.add_argument(flag, required=True, type=Path, help=f"PEM: {text}")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("prompt")
    args = parser.parse_args()
    ca, key, certificate = (file.read_bytes() for file in (args.ca, args.key, args.cert))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    request = {"model": args.model, "prompt": args.prompt, "max_tokens": args.max_tokens}
    with (
        grpc.secure_channel(args.router, credentials) as channel,
        httpx.Client(timeout=TIMEOUT_S) as http,
    ):
        answer = complete(router_pb2_grpc.RouterStub(channel), http, request)
    sys.stdout.write(answer["choices"][0]["text"] + "\n")


if __name__ == "__main__":
    main()
