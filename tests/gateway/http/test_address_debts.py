"""Debts of any number of addresses take bounded memory; credit takes a key, and is kept."""

from cleave.gateway.http.address_debts import (
    HALVING_S,
    MAX_ADDRESSES,
    MAX_CREDIT,
    SETTLED,
    AddressDebts,
)


def test_a_request_with_a_key_settles_a_connection_and_its_handshake() -> None:
    debts = AddressDebts(lambda: 0.0)
    for address in ("paid", "unpaid"):
        debts.add(address, 4)
    debts.settle("paid")
    assert (debts.get("paid"), debts.get("unpaid"), debts.get("other")) == (4 - SETTLED, 4, 0)
    assert debts.has_credit("paid")
    assert not debts.has_credit("unpaid")
    assert not debts.has_credit("other")
    for _ in range(MAX_CREDIT):
        debts.settle("paid")
    assert debts.get("paid") == -MAX_CREDIT


def test_any_number_of_addresses_takes_bounded_memory_and_leaves_credit() -> None:
    now = 0.0
    debts = AddressDebts(lambda: now)
    debts.settle("known")
    for number in range(3 * MAX_ADDRESSES):
        debts.add(str(number), 1)
        assert len(debts._debts) <= MAX_ADDRESSES
    assert debts.has_credit("known")
    for number in range(3 * MAX_ADDRESSES):
        debts.settle(str(number))
        assert len(debts._debts) <= MAX_ADDRESSES
    now = HALVING_S + 1
    debts.add("x", 1)
    assert debts.get(str(number)) == -SETTLED // 2
