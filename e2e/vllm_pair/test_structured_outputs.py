"""Answers in a form that the client states."""

from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from e2e.support.clients_environment import CLIENTS, run
from e2e.support.deployments import Deployment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Light(BaseModel):
    """What a model may say of it."""

    on: bool


def test_structured_outputs_come_from_real_engines(vllm_pair: Deployment, clients: Path) -> None:
    run(
        str(clients / "python"), str(CLIENTS / "langchain_client.py"), vllm_pair.url, "tiny", "form"
    )
    with openai.OpenAI(base_url=f"{vllm_pair.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": "Is it on?"}],
            response_format=Light,
            max_tokens=64,
            temperature=0,
        )
        assert answer.choices[0].message.parsed is not None
        response = client.responses.create(model="tiny", input="Hello", max_output_tokens=8)
        assert response.output
