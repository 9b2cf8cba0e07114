"""Node affinity as the scheduler reads it, written out differently, and random ones."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def satisfies(requirement: Mapping[str, Any], node: Mapping[str, str]) -> bool:
    """As the scheduler compares a requirement with a node's labels."""
    key, values = requirement["key"], requirement.get("values", [])
    is_number = node.get(key, "").isascii() and node.get(key, "").isdigit()
    number = int(node[key]) if is_number and int(node[key]) < 1 << 63 else None
    return {
        "In": lambda: key in node and node[key] in values,
        "NotIn": lambda: key not in node or node[key] not in values,
        "Exists": lambda: key in node,
        "DoesNotExist": lambda: key not in node,
        "Gt": lambda: number is not None and number > int(values[0]),
        "Lt": lambda: number is not None and number < int(values[0]),
    }[requirement["operator"]]()


def is_selected(affinity: Mapping[str, Any], node: Mapping[str, str]) -> bool:
    """Whether the scheduler may choose a node, for the affinity of a pod spec."""
    required = affinity.get("nodeAffinity", {}).get(REQUIRED)
    if required is None:
        return True
    return any(
        all(satisfies(each, node) for each in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def draw_affinities(
    keys: st.SearchStrategy[str], values: st.SearchStrategy[str]
) -> st.SearchStrategy[dict[str, Any]]:
    """Affinity to nodes by requirements of these labels and values."""
    numbers = st.from_regex(r"\A[0-9]{1,3}\Z")
    listed = st.lists(values | numbers, min_size=1, max_size=3)
    requirement = st.one_of(
        _build_requirement(keys, ["In", "NotIn"], listed),
        _build_requirement(keys, ["Gt", "Lt"], numbers.map(lambda number: [number])),
        _build_requirement(keys, ["Exists", "DoesNotExist"], st.just([])),
    )
    term = st.fixed_dictionaries(
        {"matchExpressions": st.lists(requirement, min_size=1, max_size=3)}
    )
    required = st.fixed_dictionaries({"nodeSelectorTerms": st.lists(term, min_size=1, max_size=3)})
    preferred = st.fixed_dictionaries({"weight": st.integers(1, 100), "preference": term})
    node = st.fixed_dictionaries(
        {}, optional={REQUIRED: required, PREFERRED: st.lists(preferred, min_size=1, max_size=2)}
    )
    return st.fixed_dictionaries({}, optional={"nodeAffinity": node})


def _build_requirement(
    keys: st.SearchStrategy[str], operators: list[str], values: st.SearchStrategy[list[str]]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda key, operator, listed: {
            "key": key, "operator": operator, **({"values": listed} if listed else {})
        },
        keys, st.sampled_from(operators), values,
    )  # fmt: skip
