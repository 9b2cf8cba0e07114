"""Converts a pydantic model to a structural schema, the form of JSON Schema that CRDs take.

Used by `cleave.api.crd`. What is hard: the API server rejects much of what pydantic generates:
references, titles, null types, closed objects, and bounds in the newer JSON Schema form.
"""

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_DROPPED_KEYS = ("title", "$defs")

_FIRST_KEYS = ("description", "type", "enum", "default", "format", "pattern")
_LAST_KEYS = ("properties", "items", "additionalProperties", "required")


def build_structural_schema(model: type[BaseModel]) -> Schema:
    """Return the model's structural schema, with field names as in YAML."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}))


def _convert(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Convert one node, and its children by recursion. Resources have no cycles."""
    node = _resolve(schema, definitions)
    node = {key: value for key, value in node.items() if key not in _DROPPED_KEYS}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if node.get("additionalProperties") is False:
        # Structural schemas are closed: the API server prunes unknown fields.
        del node["additionalProperties"]
    _convert_bound(node, "exclusiveMinimum", "minimum")
    _convert_bound(node, "exclusiveMaximum", "maximum")
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _convert(node[key], definitions)
    if "properties" in node:
        node["properties"] = {
            name: _convert(child, definitions) for name, child in node["properties"].items()
        }
    return _order_keys(_clean_default(node))


def _resolve(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Replace a reference by its target; keys beside the reference take precedence."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolve({**target, **beside}, definitions)
    options = [o for o in schema.get("anyOf", ()) if o != {"type": "null"}]
    if len(options) == 1:
        # Optional. Without `nullable` the API server drops a null, which means absent here too.
        beside = {key: value for key, value in schema.items() if key != "anyOf"}
        return _resolve({**options[0], **beside}, definitions)
    return dict(schema)


def _convert_bound(node: Schema, exclusive: str, bound: str) -> None:
    value = node.get(exclusive)
    if value is not None and not isinstance(value, bool):
        node[bound], node[exclusive] = value, True


def _clean_default(node: Schema) -> Schema:
    """Remove null defaults; an object's default is empty, as its fields have their own."""
    if node.get("default", ...) is None:
        del node["default"]
    elif isinstance(node.get("default"), dict):
        if any("default" in child for child in node.get("properties", {}).values()):
            node["default"] = {}
        else:
            del node["default"]
    return node


def _order_keys(node: Schema) -> Schema:
    """Order keys for readers: description and type, bounds, parts, Kubernetes' extensions."""

    def rank(key: str) -> tuple[int, int, str]:
        if key in _FIRST_KEYS:
            return 0, _FIRST_KEYS.index(key), key
        if key in _LAST_KEYS:
            return 2, _LAST_KEYS.index(key), key
        return (3 if key.startswith("x-") else 1), 0, key

    return {key: node[key] for key in sorted(node, key=rank)}
