"""Names as Kubernetes takes them, compared with its own rules written out differently."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.pods.names import DNS_NAME, LABEL_VALUE, is_qualified_name

INNER = string.ascii_letters + string.digits + "-_."
OUTER = string.ascii_letters + string.digits


def is_name(text: str) -> bool:
    ends = text[:1] + text[-1:]
    return 0 < len(text) <= 63 and {*text} <= {*INNER} and {*ends} <= {*OUTER}


def is_subdomain(text: str) -> bool:
    def is_label(part: str) -> bool:
        inner = {*string.ascii_lowercase, *string.digits, "-"}
        return bool(part) and {*part} <= inner and "-" not in part[0] + part[-1]

    return len(text) <= 253 and all(map(is_label, text.split(".")))


texts = st.text(alphabet="aZ0-_./ é\n", max_size=8)
long = st.builds(
    lambda text, times: text * times, st.sampled_from(["a", "a.", "b-"]), st.integers(1, 130)
)


@given(st.one_of(texts, long, st.builds("{}/{}".format, st.one_of(texts, long), texts)))
def test_qualified_names_are_kubernetes_own(text: str) -> None:
    parts = text.split("/")
    expected = len(parts) <= 2 and is_name(parts[-1]) and all(map(is_subdomain, parts[:-1]))
    assert is_qualified_name(text) is expected


@given(st.one_of(texts, long))
def test_label_values_and_names_of_objects_are_kubernetes_own(text: str) -> None:
    assert bool(re.fullmatch(LABEL_VALUE, text) and len(text) <= 63) is (not text or is_name(text))
    assert bool(re.fullmatch(DNS_NAME, text) and len(text) <= 253) is is_subdomain(text)


@pytest.mark.parametrize(
    "key", ["kueue.x-k8s.io/queue-name", "k8s.v1.cni.cncf.io/networks", "a_B.c"]
)
def test_usual_keys_are_taken(key: str) -> None:
    assert is_qualified_name(key)
