"""OpenAI's Agents SDK and Anthropic's SDK, unmodified: the decode engine of an answer is killed.

Prefill and decode are apart. The Agents SDK speaks Responses, Anthropic's SDK Messages. Neither may
notice the loss, and the answer is the one that an undisturbed engine gives.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import agents
import anthropic
import httpx
import openai
import pytest

from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, deployed, emulated, idle, until

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 150
TOKENS = {"min_tokens": 400}
"""The Agents SDK takes an answer only where it has come to its own end. So many take 8 s, in which
the engine must be killed."""
SEEN = 20
"""Pieces of an answer that its client has got when the engine is killed."""
QUESTION = "Which river runs under the old stone bridge? " * 12
INSTRUCTIONS = "Answer like a guide of this town."
# Both SDKs would hide a lost stream by a request of their own.
CLIENT: dict[str, Any] = {"api_key": "none", "timeout": TIMEOUT_S, "max_retries": 0}

OnPiece = Callable[[], Awaitable[None]]
Answer = tuple[str, int, int]
"""Text, tokens of the prompt, tokens of the text."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two prefill and two decode instances, slow enough that an answer has a middle."""
    manifest = emulated("four", 2, 2, time_scale=1.0, lease_s=6)
    with deployed(manifest, tmp_path_factory.mktemp("four"), 180) as deployment:
        yield deployment


async def ask_agent(url: str, on_piece: OnPiece) -> Answer:
    """Two turns of an agent over Responses; the second sends the answer of the first back."""
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", **CLIENT) as client:
        agent = agents.Agent(
            name="guide",
            instructions=INSTRUCTIONS,
            model=agents.OpenAIResponsesModel("four", client),
            model_settings=agents.ModelSettings(temperature=0.7, extra_body=TOKENS),
        )
        first = agents.Runner.run_streamed(agent, QUESTION)
        async for event in first.stream_events():
            if event.type == "raw_response_event" and event.data.type.endswith("text.delta"):
                await on_piece()
        turns = [*first.to_input_list(), {"role": "user", "content": "And then?"}]
        second = await agents.Runner.run(agent, turns)
    usage = first.context_wrapper.usage
    text = f"{first.final_output}\n{second.final_output}"
    return text, usage.input_tokens, usage.output_tokens


async def ask_anthropic(url: str, on_piece: OnPiece) -> Answer:
    """One streamed message."""
    async with (
        anthropic.AsyncAnthropic(base_url=url, **CLIENT) as client,
        client.messages.stream(
            model="four",
            max_tokens=4_000,
            system=INSTRUCTIONS,
            messages=[{"role": "user", "content": QUESTION}],
            extra_body=TOKENS,
        ) as stream,
    ):
        async for _ in stream.text_stream:
            await on_piece()
        message = await stream.get_final_message()
    return message.content[0].text, message.usage.input_tokens, message.usage.output_tokens


async def do_nothing() -> None:
    """Let the answer come to its end."""


def find_decoding(deployment: Deployment) -> str:
    """The decode instance that runs a request now."""
    found: set[str] = set()

    def is_found() -> bool:
        found.update(
            health.registration.instance
            for health in deployment.healths()
            if health.registration.role == agent_pb2.ROLE_DECODE and health.load.num_running
        )
        return bool(found)

    until(is_found, TIMEOUT_S, "an instance decodes")
    (name,) = found
    return name


def are_ready(deployment: Deployment) -> bool:
    found = deployment.instances().values()
    return len(found) == 4 and all(each.kv_path.verified and not each.reason for each in found)


def count(deployment: Deployment, sample: str) -> float:
    page = httpx.get(f"{deployment.url}/metrics", timeout=TIMEOUT_S).text
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(sample)
    )


@pytest.mark.parametrize("victim", ["engine", "instance"])
@pytest.mark.parametrize("ask", [ask_agent, ask_anthropic], ids=["agents", "anthropic"])
def test_an_answer_is_complete_though_its_decode_engine_is_killed(
    four: Deployment, ask: Callable[[str, OnPiece], Coroutine[Any, Any, Answer]], victim: str
) -> None:
    until(lambda: are_ready(four), TIMEOUT_S, "all four are there")
    expected = asyncio.run(ask(four.url, do_nothing))
    assert expected[2] > 5 * SEEN
    processes = {
        name: four.engine(name) if victim == "engine" else four.agent(name)
        for name in ("four-decode-0", "four-decode-1")
    }
    boot_ids = {name: found.boot_id for name, found in four.instances().items()}
    handoffs = count(four, 'cleave_gateway_handoffs_total{result="used"}')
    continued = count(four, 'cleave_gateway_recoveries_total{how="continued"')
    pieces, killed = 0, []

    async def kill_once() -> None:
        nonlocal pieces
        pieces += 1
        if pieces == SEEN:
            name = await asyncio.to_thread(find_decoding, four)
            os.kill(processes[name].pid, signal.SIGKILL)
            killed.append(name)

    assert asyncio.run(ask(four.url, kill_once)) == expected
    assert count(four, 'cleave_gateway_recoveries_total{how="continued"') == continued + 1
    assert count(four, 'cleave_gateway_handoffs_total{result="used"}') > handoffs, "two made it"
    until(
        lambda: (
            {name for name, found in four.instances().items() if found.boot_id != boot_ids[name]}
            == {*killed}
        ),
        TIMEOUT_S,
        "the instance is back, and only that one was lost",
    )
    until(lambda: idle(four), TIMEOUT_S, "nothing is held")
