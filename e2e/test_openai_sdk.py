"""The openai Python SDK, unmodified, against the gateway (emulated engines behind it)."""

from collections.abc import Iterator

import openai
import pytest

from e2e.support.deployments import Deployment, deployed, emulated, idle, until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(emulated("chat", 1, 1), tmp_path_factory.mktemp("sdk"), 180) as deployment:
        yield deployment


@pytest.fixture
def client(chat: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{chat.url}/v1", api_key="unused", timeout=30, max_retries=0
    ) as client:
        yield client


MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.prompt_tokens > 0


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=24)
    stream = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt="Once upon a time", max_tokens=8)
    assert answer.choices[0].text
    streamed = client.completions.create(
        model="chat", prompt="Once upon a time", max_tokens=8, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed if c.choices) == answer.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat"]


def test_an_unknown_model_is_an_error_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as raised:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert raised.value.code == "model_not_found"


def test_what_the_engine_refuses_reaches_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=-1)


def test_a_stream_that_is_closed_early_frees_the_engine(
    client: openai.OpenAI, chat: Deployment
) -> None:
    stream = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=2_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()

    until(lambda: idle(chat), 60, "both engines are free again")
