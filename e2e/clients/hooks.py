"""For schemathesis: most made-up requests ask for a model that is there, not to end with 404."""

import os

import schemathesis

MODEL = os.environ["MODEL"]


@schemathesis.hook
def map_body(context: object, body: object) -> object:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 8:
        return {**body, "model": MODEL}
    return body
