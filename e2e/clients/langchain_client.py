"""LangChain's ChatOpenAI as its users write it: python langchain_client.py URL MODEL [form]."""

import asyncio
import sys
from typing import Literal

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    """Whether it is so."""

    answer: Literal["yes", "no"]


@tool
def switch(state: Literal["on", "off"]) -> str:
    """Switch the light."""
    return state


def main(url: str, model: str, *what: str) -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        model=model,
        temperature=0,
        max_tokens=200 if what else 24,
    )
    if what:
        keep_to_a_form(chat)
    else:
        talk(chat)
        asyncio.run(talk_async(chat))
        hear_errors(chat)


def talk(chat: ChatOpenAI) -> None:
    """Whole, streamed, several at once, in a conversation."""
    whole = chat.invoke("What is the capital of France?")
    assert whole.content
    assert 0 < whole.usage_metadata["output_tokens"] <= 24

    pieces = list(chat.stream("What is the capital of France?", stream_usage=True))
    assert len(pieces) > 2
    assert "".join(piece.content for piece in pieces) == whole.content
    counted = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert counted[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]

    several = chat.batch(["What is the capital of France?", "And of Spain?"])
    assert several[0].content == whole.content != several[1].content

    answer = chat.invoke([("system", "Be short."), ("user", "Hello"), whole, ("user", "And now?")])
    assert answer.content
    assert chat.bind_tools([switch]).invoke("Hello").content is not None


async def talk_async(chat: ChatOpenAI) -> None:
    """The same from an event loop."""
    whole = await chat.ainvoke("Hello")
    pieces = [piece.content async for piece in chat.astream("Hello")]
    assert "".join(pieces) == whole.content


def hear_errors(chat: ChatOpenAI) -> None:
    """A model without instances."""
    try:
        chat.model_copy(update={"model_name": "gpt-9"}).invoke("Hello")
    except openai.NotFoundError as error:
        message = str(error)
    else:
        raise AssertionError("gpt-9 answered")
    assert "gpt-9" in message


def keep_to_a_form(chat: ChatOpenAI) -> None:
    """An answer that a schema states."""
    verdict = chat.with_structured_output(Verdict, method="json_schema").invoke("Is it so?")
    assert verdict.answer in ("yes", "no")


if __name__ == "__main__":
    main(*sys.argv[1:])
