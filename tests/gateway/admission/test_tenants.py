"""The file of keys: whose they are, what they may do, and what is wrong with it."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from cleave.api.enums import LateRequestPolicy
from cleave.gateway.admission.api_keys import ApiKeys, read_api_keys
from cleave.gateway.admission.rate_limit import TenantLimits
from cleave.gateway.admission.tenants import DEFAULT_TENANT, ApiKeysError, Tenant

HASHED = "sha256:" + hashlib.sha256(b"secret-of-search").hexdigest()
FILE = f"""
# Comments may come first.
tenants:
- name: search
  keys: [{HASHED}, other-of-search-1]
  requestsPerMinute: 600
  tokensPerMinute: 100000
  maxConcurrent: 8
  maxQueued: 4
  minRequestPriority: -5
  weight: 2.5
  priority: 3
  late: Refuse
- name: batch
  keys: [third-of-batch-key]
"""


def read(tmp_path: Path, text: str) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return read_api_keys(path)


def test_a_tenants_keys_lead_to_its_limits(tmp_path) -> None:
    keys = read(tmp_path, FILE)
    search = Tenant(
        "search", TenantLimits(600, 100_000, 8), 2.5, 3, -5, 4, LateRequestPolicy.REFUSE
    )
    found = keys.find_tenant(b"Bearer secret-of-search")
    assert found == keys.find_tenant(b"bearer other-of-search-1")
    assert found
    assert msgspec.structs.replace(found, cache_salt="") == search
    batch = keys.find_tenant(b"Bearer third-of-batch-key")
    assert batch
    assert msgspec.structs.replace(batch, cache_salt="") == Tenant("batch", min_request_priority=0)
    assert keys.find_tenant(b"Bearer sha256:" + HASHED.encode()) is None
    assert keys.find_tenant(None) is None
    assert {tenant.name for tenant in keys.tenants} == {"search", "batch"}


def test_a_plain_list_is_one_tenant_without_limits(tmp_path) -> None:
    keys = read(tmp_path, f"one-of-plain-keys # mine\n\n# nothing\n{HASHED}\n")
    assert (
        keys.find_tenant(b"Bearer one-of-plain-keys")
        is keys.find_tenant(b"Bearer secret-of-search")
        is DEFAULT_TENANT
    )
    assert keys.find_tenant(b"Bearer two") is None


@pytest.mark.interpreted
def test_no_stored_value_contains_a_key(tmp_path) -> None:
    keys = read(tmp_path, "plain-key-of-client\n")
    assert "plain-key-of-client" not in repr(keys.__dict__)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# only\n", "holds no key"),
        ("tenants: [\n", "line 2: is not YAML"),
        ("tenants: []\n", "length"),
        ("tenants:\n- {name: a, keys: []}\n", "length"),
        ("tenants:\n- {name: a}\n", "`keys`"),
        ("tenants:\n- {name: A, keys: [x-key-of-tenants]}\n", "name"),
        ("tenants:\n- {name: a, keys: [x-key-of-tenants], weight: 0}\n", "weight"),
        ("tenants:\n- {name: a, keys: [x-key-of-tenants], tokensPerHour: 3}\n", "tokensPerHour"),
        (
            "tenants:\n- {name: a, keys: [x-key-of-tenants], requestsPerMinute: 0}\n",
            "requestsPerMinute",
        ),
        ("tenants:\n- {name: a, keys: [x-key-of-tenants], late: Never}\n", "late"),
        (
            (
                "tenants:\n- {name: a, keys: [x-key-of-tenants]}\n"
                "- {name: a, keys: [y-key-of-tenants]}\n"
            ),
            "two tenants",
        ),
        (
            (
                "tenants:\n- {name: a, keys: [x-key-of-tenants]}\n"
                "- {name: b, keys: [x-key-of-tenants]}\n"
            ),
            "in common",
        ),
        ("tenants:\n- {name: a, keys: ['sha256:12']}\n", "64 hexadecimal digits"),
        ("short\n", "5 characters, fewer than 16"),
        ("tenants:\n- {name: a, keys: [fifteen-letters]}\n", "openssl rand"),
        ("sha256:zz\n", "64 hexadecimal digits"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(tmp_path, text: str, said: str) -> None:
    with pytest.raises(ApiKeysError) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_tenants_share_cached_prompts_only_where_the_file_says_so(tmp_path) -> None:
    lines = (
        "tenants:",
        "- {name: a, keys: [one-of-many-tenants]}",
        "- {name: b, keys: [two-of-many-tenants]}",
        "- {name: c, keys: [three-of-many-tenants], cacheGroup: g}",
        "- {name: d, keys: [four-of-many-tenants], cacheGroup: g}",
        "- {name: g, keys: [five-of-many-tenants]}",
    )
    keys = read(tmp_path, "\n".join(lines))
    a, b, c, d, g = (
        keys.find_tenant(b"Bearer " + key).cache_salt
        for key in (
            b"one-of-many-tenants",
            b"two-of-many-tenants",
            b"three-of-many-tenants",
            b"four-of-many-tenants",
            b"five-of-many-tenants",
        )
    )
    assert c == d
    assert len({a, b, c, g}) == 4
    assert all((a, b, c, g))
    assert not DEFAULT_TENANT.cache_salt
