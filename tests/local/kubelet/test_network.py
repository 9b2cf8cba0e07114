"""Which ports of this machine are given out."""

import socket

import pytest

from cleave.local.kubelet.network import HOST_IP, find_busy_ports, find_internal_port


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
