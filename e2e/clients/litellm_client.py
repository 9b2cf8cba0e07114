"""LiteLLM's SDK in front of an OpenAI-compatible server: python litellm_client.py URL MODEL."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it downloads a list of prices

import litellm


def main(url: str, model: str) -> None:
    call = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": 24,
    }
    talk(call)
    go_on(call)
    asyncio.run(talk_async(call))
    hear_errors(call)


def talk(call: dict) -> None:
    """Whole and streamed."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = litellm.completion(messages=messages, **call)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens <= 24

    stream = litellm.completion(
        messages=messages, stream=True, stream_options={"include_usage": True}, **call
    )
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def go_on(call: dict) -> None:
    """Completions, which LiteLLM keeps under a name of their own."""
    call = {**call, "model": call["model"].replace("openai/", "text-completion-openai/")}
    whole = litellm.text_completion(prompt="Once upon a time", **call)
    assert whole.choices[0].text
    pieces = litellm.text_completion(prompt="Once upon a time", stream=True, **call)
    text = "".join(piece.choices[0].text or "" for piece in pieces)
    assert text == whole.choices[0].text


async def talk_async(call: dict) -> None:
    """Several at once from an event loop, one of them streamed."""
    messages = [{"role": "user", "content": "Hello"}]
    wholes = await asyncio.gather(
        *(litellm.acompletion(messages=messages, **call) for _ in range(4))
    )
    stream = await litellm.acompletion(messages=messages, stream=True, **call)
    text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    assert {whole.choices[0].message.content for whole in wholes} == {text}


def hear_errors(call: dict) -> None:
    """A model without instances."""
    try:
        litellm.completion(messages=[], **{**call, "model": "openai/gpt-9"}, num_retries=0)
    except litellm.NotFoundError as error:
        message = str(error)
    else:
        raise AssertionError("gpt-9 answered")
    assert "gpt-9" in message


if __name__ == "__main__":
    main(*sys.argv[1:])
