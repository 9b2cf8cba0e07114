"""The HTTP API as OpenAI's clients and vLLM's users know it."""

import asyncio
import itertools
import json
import time

import openai
import pytest

from cleave_worker.emulator import api

WORDS = "The quick brown fox jumps over the lazy dog. "


async def events(server, body: dict, path: str = "/v1/completions") -> list:
    """Decoded events of a stream; the last one is the text [DONE]."""
    async with server.session.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    found = [part.removeprefix("data: ") for part in parts]
    return [*(json.loads(part) for part in found[:-1]), found[-1]]


async def test_openais_client_streams_a_chat(serve) -> None:
    server = await serve()
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": WORDS}],
            "max_completion_tokens": 12,
        }
        stream = await client.chat.completions.create(
            **body,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text == whole.choices[0].message.content
    assert len(text) == 12 * len(" word")
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


async def test_usage_has_cached_tokens_where_the_engine_is_to_show_them(serve) -> None:
    prompt, details = [*range(5, 45)], []
    for shows in (False, True):
        server = await serve(shows_prompt_details=shows)
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            for _ in range(2):
                stream = await client.completions.create(
                    model="m",
                    prompt=prompt,
                    max_tokens=2,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                usage = [chunk async for chunk in stream][-1].usage
                assert usage is not None
                details.append(usage.prompt_tokens_details)
    assert details[:2] == [None, None]
    assert [each and each.cached_tokens for each in details[2:]] == [0, 32]


async def test_each_token_is_one_event_and_done_ends_the_stream(serve) -> None:
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 7, "ignore_eos": True}
    *found, done = await events(server, body)
    assert done == "[DONE]"
    texts = [event["choices"][0]["text"] for event in found]
    assert len(texts) == 7
    assert "".join(texts) == await server.text(body)
    reasons = [event["choices"][0]["finish_reason"] for event in found]
    assert reasons == [None] * 6 + ["length"]
    assert {event["id"] for event in found} == {found[0]["id"]}


async def test_all_events_of_a_stream_have_one_time(serve, monkeypatch) -> None:
    server = await serve()
    monkeypatch.setattr(time, "time", itertools.count(1).__next__)
    body = {"prompt": WORDS, "max_tokens": 3, "n": 2, "ignore_eos": True}
    *found, _ = await events(server, body)
    assert len(found) == 6
    assert len({event["created"] for event in found}) == 1


async def test_a_stream_of_one_token_names_the_role_and_ends(serve) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    found = await events(await serve(), body, "/v1/chat/completions")
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None, "length"]


async def test_text_goes_on_from_prompt_and_text_so_far(serve) -> None:
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 10, "ignore_eos": True}
    text = await server.text(body)
    rest = await server.text({**body, "prompt": WORDS + text[:20], "max_tokens": 6})
    assert text == text[:20] + rest


async def test_a_chat_goes_on_from_an_unfinished_answer(serve) -> None:
    server = await serve()
    question = {"role": "user", "content": WORDS}
    body = {"messages": [question], "max_tokens": 10, "ignore_eos": True}

    async def answer(body: dict) -> str:
        _, found = await server.post(body, "/v1/chat/completions")
        return found["choices"][0]["message"]["content"]

    text = await answer(body)
    so_far = {"role": "assistant", "content": text[:25]}
    more = {"messages": [question, so_far], "continue_final_message": True, "max_tokens": 5}
    assert text[25:] == await answer({**body, **more})
    status, refusal = await server.post(
        {**body, **more, "add_generation_prompt": True}, "/v1/chat/completions"
    )
    assert (status, refusal["error"]["param"]) == (400, "continue_final_message")


async def test_a_prompt_of_token_ids_is_counted_exactly(serve) -> None:
    server = await serve()
    status, answer = await server.post({"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True})
    assert status == 200
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert (
        await server.text({"prompt": [[5, 6, 7]], "max_tokens": 2, "ignore_eos": True})
        == (answer["choices"][0]["text"])
    )


async def test_an_answer_always_carries_the_key_kv_transfer_params(serve) -> None:
    _, answer = await (await serve()).post({"prompt": "a"})
    assert answer["kv_transfer_params"] is None
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] <= 16


async def test_the_request_id_of_the_caller_is_in_the_answer(serve) -> None:
    _, answer = await (await serve()).post({"prompt": "a"}, **{"X-Request-Id": "abc"})
    assert answer["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 65}, "n"),
        ({"prompt": "a", "n": 2, "kv_transfer_params": {"do_remote_decode": True}}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": [7]}, "stop"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [50272]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "7"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "max_tokens": 2048}, "input_tokens"),
        ({"prompt": [7] * 2048}, "input_tokens"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "tools": {}}, "tools"),
        ({"prompt": "a", "stop": {"a": 1}}, "stop"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "structured_outputs": "a"}, "structured_outputs"),
        ({"prompt": "a", "kv_transfer_params": 1}, "kv_transfer_params"),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ],
)
async def test_a_wrong_completion_is_refused_with_the_parameter(serve, body, param) -> None:
    status, answer = await (await serve()).post(body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == 400
    assert answer["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [1], [{"content": "x"}], [{"role": "user", "content": 1}],
     [{"role": "user", "content": [{"type": "image_url"}]}]],
)  # fmt: skip
async def test_a_wrong_chat_is_refused(serve, messages) -> None:
    status, answer = await (await serve()).post({"messages": messages}, "/v1/chat/completions")
    assert (status, answer["error"]["param"]) == (400, "messages")


async def test_text_parts_are_accepted(serve) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    status, _ = await (await serve()).post({**body, "max_tokens": 1}, "/v1/chat/completions")
    assert status == 200


async def test_another_model_is_not_found(serve) -> None:
    status, answer = await (await serve()).post({"model": "other", "prompt": "a"})
    assert status == 404
    assert answer["error"]["message"] == "The model `other` does not exist."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff"])
async def test_a_body_that_is_no_json_object_is_refused(serve, body: bytes) -> None:
    server = await serve()
    async with server.session.post(server.url + "/v1/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "BadRequestError"


async def test_models_version_and_health_answer(serve) -> None:
    server = await serve()
    async with server.session.get(server.url + "/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("m", 2048)
    async with server.session.get(server.url + "/version") as response:
        assert (await response.json())["version"] == "0.32.0"
    async with server.session.get(server.url + "/health") as response:
        assert response.status == 200


async def test_metrics_count_tokens_under_vllms_names(serve) -> None:
    server = await serve()
    await server.text({"prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True})
    samples = await server.samples()
    assert samples["vllm:prompt_tokens_total"] == 40
    assert samples["vllm:generation_tokens_total"] == 5
    assert samples['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 40
    assert samples["vllm:iteration_tokens_total_sum"] == 44
    assert samples["vllm:iteration_tokens_total_count"] == 5
    assert samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:inter_token_latency_seconds_count"] == 4
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 1
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 1
    assert samples["vllm:num_requests_running"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:num_preemptions_total"] == 0
    assert samples["vllm:prefix_cache_queries_total"] == samples["vllm:prompt_tokens_total"]
    assert samples["vllm:prefix_cache_hits_total"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(serve, stream: bool) -> None:
    server = await serve(time_scale=1.0)
    body = {"prompt": [7] * 100, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    url = server.url + "/v1/completions"
    task = asyncio.create_task(server.session.post(url, json=body))
    await server.until(lambda: server.num_used_blocks > 0)
    if stream:
        (await task).close()
    task.cancel()
    await server.until(lambda: server.num_used_blocks == 0)
    assert server.engine.metrics.finished["abort"] == 1
    assert server.engine.scheduler.pending_prompt_tokens == 0


async def test_many_streams_at_once_equal_single_answers_on_scarce_blocks(serve) -> None:
    server = await serve(num_blocks=40, max_model_len=300, time_scale=0.005)
    plain = await serve("B", time_scale=0.005)
    bodies = [
        {"prompt": [n + 5] * (20 + n), "max_tokens": 60, "ignore_eos": True} for n in range(16)
    ]
    streams = await asyncio.gather(*(events(server, body) for body in bodies))
    wholes = await asyncio.gather(*(plain.text(body) for body in bodies))
    texts = ["".join(e["choices"][0]["text"] for e in found[:-1]) for found in streams]
    assert texts == wholes
    assert server.engine.scheduler.num_preemptions > 0
    assert server.num_used_blocks == 0


async def test_requests_beyond_the_limit_are_refused(serve, monkeypatch) -> None:
    monkeypatch.setattr(api, "_MAX_REQUESTS", 1)
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 5}
    server.engine.faults.apply(b'{"hang": true}')
    first = asyncio.create_task(server.post(body))
    await server.until(lambda: server.engine.num_requests == 1)
    assert (await server.post(body))[0] == 503
    server.engine.faults.clear()
    assert (await first)[0] == 200
    assert (await server.post(body))[0] == 200


async def test_a_client_that_does_not_read_is_cut_off(serve, monkeypatch) -> None:
    monkeypatch.setattr(api, "_MAX_UNSENT", 1 << 16)
    server = await serve(time_scale=0, max_model_len=60_000)
    body = {"prompt": "a", "max_tokens": 59_000, "ignore_eos": True, "stream": True}
    async with server.session.post(server.url + "/v1/completions", json=body) as response:
        await server.until(lambda: server.engine.metrics.finished["abort"] == 1)
        assert server.num_used_blocks == 0
        response.close()


async def test_iterations_last_as_long_as_the_latency_model_says(serve) -> None:
    server = await serve(time_scale=0.5)
    loop = asyncio.get_running_loop()
    started = loop.time()
    await server.text({"prompt": [7] * 100, "max_tokens": 21, "ignore_eos": True})
    model = server.engine.config.profile.timing
    expected_ms = 0.5 * (model.predict_prefill_ms([100]) + 20 * model.predict_decode_ms(1, 110))
    assert (loop.time() - started) * 1000 >= 0.99 * expected_ms


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_token_ids_come_on_request_and_go_on_where_they_end(serve, chat) -> None:
    server = await serve()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"messages": [{"role": "user", "content": WORDS}]} if chat else {"prompt": WORDS}
    more = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    *found, _ = await events(server, body | more, path)
    first = found[0] if chat else found[0]["choices"][0]
    prompt = first["prompt_token_ids"]
    ids = [number for e in found for number in e["choices"][0].get("token_ids") or ()]
    assert len(ids) == 6
    texts = [e["choices"][0].get("text") or e["choices"][0]["delta"]["content"] for e in found]
    rest = {"prompt": prompt + ids[:4], "max_tokens": 2, "ignore_eos": True}
    assert await server.text(rest) == "".join(texts)[4 * len(" word") :]
    tokenized = await server.post(body, "/tokenize")
    assert tokenized[1]["tokens"] == prompt
    back = await server.post({"tokens": ids}, "/detokenize")
    assert back[1] == {"prompt": "".join(texts)}


async def test_each_choice_and_each_seed_is_another_answer(serve) -> None:
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 6, "ignore_eos": True, "n": 3}
    _, answer = await server.post(body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 18
    *found, _ = await events(server, body)
    streamed = ["", "", ""]
    for event in found:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    alone = {"prompt": WORDS, "max_tokens": 6, "ignore_eos": True}
    seeded = [await server.text(alone | {"seed": seed}) for seed in (1, 2, 1)]
    assert seeded[0] == seeded[2] != seeded[1]
    assert await server.text(alone | {"seed": 1, "temperature": 0}) == await server.text(alone)


async def test_a_seeds_draws_are_used_up_by_the_tokens_so_far(serve) -> None:
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 8, "ignore_eos": True, "seed": 5}
    text = await server.text(body)
    rest = await server.text(body | {"prompt": WORDS + text[:20], "max_tokens": 4})
    assert text != text[:20] + rest


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_a_stop_string_ends_the_answer_before_it(serve, chat) -> None:
    server = await serve()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    request = {"messages": [{"role": "user", "content": WORDS}]} if chat else {"prompt": WORDS}
    body = request | {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    _, answer = await server.post(body, path)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    stop = text[12:18]
    _, answer = await server.post(body | {"stop": stop}, path)
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if chat else choice["text"]) == text[:12]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    *found, _ = await events(server, body | {"stop": [stop, "never"]}, path)
    choices = [event["choices"][0] for event in found]
    streamed = "".join(one["delta"]["content"] if chat else one["text"] for one in choices)
    assert (streamed, choices[-1]["stop_reason"]) == (text[:12], stop)
    *found, _ = await events(server, body | {"stop": "never said"}, path)
    choices = [event["choices"][0] for event in found]
    assert "".join(one["delta"]["content"] if chat else one["text"] for one in choices) == text


async def test_log_probabilities_have_the_form_of_their_api(serve) -> None:
    server = await serve()
    body = {"prompt": WORDS, "max_tokens": 3, "ignore_eos": True, "logprobs": 0}
    _, answer = await server.post(body)
    whole = answer["choices"][0]["logprobs"]
    assert "".join(whole["tokens"]) == answer["choices"][0]["text"]
    assert whole["text_offset"] == [0, 5, 10]
    *found, _ = await events(server, body)
    parts = [event["choices"][0]["logprobs"] for event in found]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    requested = chat | {"logprobs": True, "top_logprobs": 1}
    _, answer = await server.post(requested, "/v1/chat/completions")
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1]
