"""Which ports of this machine are given out."""

import socket

import pytest

from cleave.local.kubelet.network import (
    HOST_IP,
    LoopbackNetwork,
    find_busy_ports,
    find_internal_port,
)


@pytest.mark.parametrize("port", [1, 8080, 55_535, 55_536, 65_535])
def test_a_gateway_has_an_internal_port_far_from_its_own(port: int) -> None:
    found = find_internal_port(port)
    assert 9_000 < abs(found - port) <= 10_100
    assert 0 < found < 65_536


def test_an_occupied_internal_port_is_skipped() -> None:
    first = find_internal_port(8080)
    with socket.socket() as occupied:
        occupied.bind((HOST_IP, first))
        occupied.listen()
        second = find_internal_port(8080)
    assert second > first
    assert not find_busy_ports(HOST_IP, [second])


def test_deployments_of_one_name_that_start_together_get_addresses_of_their_own() -> None:
    networks = [LoopbackNetwork("chat") for _ in range(3)]
    try:
        # Neither listens yet, so that only the lock of the block keeps them apart.
        addresses = [network.allocate([9000]) for network in networks]
    finally:
        for network in networks:
            network.close()
    assert len(set(addresses)) == 3
    again = LoopbackNetwork("chat")
    assert again.allocate([9000]) == addresses[0]
    again.close()
