"""aiohttp: aiohttp_client.py URL MODEL prints what test_http_clients.py compares, as JSON."""

import asyncio
import json
import sys

import aiohttp


async def main(url: str, model: str) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 24}
    streamed, pieces = "", 0
    async with aiohttp.ClientSession(url) as session:
        async with session.post("/v1/completions", json=body) as response:
            whole = (await response.json())["choices"][0]["text"]
        async with session.post("/v1/completions", json=body | {"stream": True}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    streamed += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
                    pieces += 1
        async with session.post("/v1/completions", json=body | {"model": "gpt-9"}) as response:
            error = (await response.json())["error"]
    found = {"whole": whole, "streamed": streamed, "pieces": pieces}
    print(json.dumps(found | {"status": response.status, "code": error["code"]}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
