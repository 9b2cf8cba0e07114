"""SDKs of OpenAI and Anthropic on vLLM: Responses and Messages say what a chat says, split."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from e2e.support.deployments import Deployment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TIMEOUT_S = 180
QUESTION = "Which river runs under the old stone bridge BCDFG? " * 6
SYSTEM = "Answer in one word."
TOKENS = 12


@pytest.fixture
def openai_client(vllm_pair: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{vllm_pair.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def anthropic_client(vllm_pair: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=vllm_pair.url, api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        yield client


@pytest.fixture
def chat(openai_client: openai.OpenAI) -> tuple[str, int]:
    """What a chat answers, and the tokens of its prompt."""
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
        max_completion_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == TOKENS
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_responses_say_what_a_chat_says(
    openai_client: openai.OpenAI, chat: tuple[str, int]
) -> None:
    fields = {
        "model": "tiny",
        "instructions": SYSTEM,
        "input": QUESTION,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    raw = openai_client.responses.with_raw_response.create(**fields)
    assert "x-cleave-prefill" in raw.headers, "two instances made it"
    whole = raw.parse()
    assert (whole.output_text, whole.usage.input_tokens) == chat
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", TOKENS)
    events = list(openai_client.responses.create(**fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == chat[0]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage == whole.usage


def test_messages_say_what_a_chat_says(
    anthropic_client: anthropic.Anthropic, chat: tuple[str, int]
) -> None:
    fields = {
        "model": "tiny",
        "system": SYSTEM,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": TOKENS,
        # A field that this SDK does not know any more.
        "extra_body": {"temperature": 0, "ignore_eos": True},
    }
    raw = anthropic_client.messages.with_raw_response.create(**fields)
    assert "x-cleave-prefill" in raw.headers, "two instances made it"
    whole = raw.parse()
    assert (whole.content[0].text, whole.usage.input_tokens) == chat
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", TOKENS)
    with anthropic_client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == chat[0]
        assert stream.get_final_message().usage.output_tokens == TOKENS
    counted = anthropic_client.messages.count_tokens(
        model="tiny", system=SYSTEM, messages=fields["messages"]
    )
    assert counted.input_tokens == chat[1]
