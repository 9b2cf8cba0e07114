// Node's fetch: node fetch.mjs URL MODEL prints what test_http_clients.py compares, as JSON.
const [url, model] = process.argv.slice(2);

function send(fields) {
  return fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, prompt: "Once upon a time", max_tokens: 24, ...fields }),
  });
}

// A connection is free again a moment after the last piece of its answer.
function free() {
  return new Promise((go) => setTimeout(go, 100));
}

const whole = await (await send({})).json();
await free();
let streamed = "";
let pieces = 0;
let rest = "";
const decoder = new TextDecoder();
for await (const data of (await send({ stream: true })).body) {
  const events = (rest + decoder.decode(data, { stream: true })).split("\n\n");
  rest = events.pop();
  for (const event of events) {
    if (event === "data: [DONE]") continue;
    streamed += JSON.parse(event.slice("data: ".length)).choices[0].text;
    pieces += 1;
  }
}
await free();
const refused = await send({ model: "gpt-9" });
const { error } = await refused.json();
console.log(JSON.stringify({ whole: whole.choices[0].text, streamed, pieces, status: refused.status, code: error.code }));
