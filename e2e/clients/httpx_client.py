"""httpx: httpx_client.py URL MODEL prints what test_http_clients.py compares, as JSON."""

import json
import sys

import httpx


def main(url: str, model: str) -> None:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 24}
    streamed, pieces = "", 0
    with httpx.Client(base_url=url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    streamed += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    pieces += 1
        refused = client.post("/v1/completions", json=body | {"model": "gpt-9"})
    error = refused.json()["error"]
    found = {"whole": whole, "streamed": streamed, "pieces": pieces}
    print(json.dumps(found | {"status": refused.status_code, "code": error["code"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
