"""Debts of any number of addresses take bounded memory; credit takes a key, and is kept."""

from cleave.gateway.http.address_debts import (
    HALVING_S,
    MAX_ADDRESSES,
    MAX_CREDIT,
    MAX_EXPECTED,
    SETTLED,
    AddressDebts,
)


def settle(debts: AddressDebts, address: str) -> None:
    debts.expect_request(address)
    debts.settle(address)


def test_a_request_with_a_key_settles_a_connection_and_its_handshake() -> None:
    debts = AddressDebts(lambda: 0.0)
    for address in ("paid", "unpaid"):
        debts.add(address, 4)
    settle(debts, "paid")
    assert (debts.get("paid"), debts.get("unpaid"), debts.get("other")) == (4 - SETTLED, 4, 0)
    assert debts.has_credit("paid")
    assert not debts.has_credit("unpaid")
    assert not debts.has_credit("other")
    for _ in range(MAX_CREDIT):
        settle(debts, "paid")
    assert debts.get("paid") == -MAX_CREDIT


def test_any_number_of_addresses_takes_bounded_memory_and_leaves_the_credit_of_who_uses_it() -> (
    None
):
    now = 0.0
    debts = AddressDebts(lambda: now)
    settle(debts, "known")
    for number in range(3 * MAX_ADDRESSES):
        debts.add(str(number), 1)
    assert debts.get("known") == -SETTLED
    for number in range(3 * MAX_ADDRESSES):
        settle(debts, str(number))
        if number % 1_000 == 0:
            settle(debts, "known")
    assert debts.has_credit("known")
    assert not debts.has_credit("0"), "it has not been used for long"
    assert len(debts._debts) <= MAX_ADDRESSES
    assert len(debts._credits) == MAX_ADDRESSES
    now = HALVING_S + 1
    debts.add("x", 1)
    assert debts.get("known") == -MAX_CREDIT // 2
    assert debts.get("x") == 1


def test_credit_counts_for_few_silent_connections() -> None:
    """A request now and then would make any number of them places that are never given up."""
    debts = AddressDebts(lambda: 0.0)
    settle(debts, "a")
    for _ in range(MAX_EXPECTED + 1):
        assert debts.has_credit("a")
        debts.expect_request("a")
    assert not debts.has_credit("a")
    settle(debts, "b")
    assert debts.has_credit("b"), "each address by itself"
    debts.forget("a")
    assert debts.has_credit("a")
    for _ in range(MAX_EXPECTED):
        debts.forget("a")
    assert not debts._expected
