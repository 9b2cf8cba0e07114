"""Addresses and ports to listen on, as the options of gateway, operator and agent name them."""

import argparse


def parse_hosts(text: str) -> tuple[str, ...]:
    """Addresses or host names separated by commas. Raises argparse.ArgumentTypeError."""
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts):
        raise argparse.ArgumentTypeError(
            f"{text!r} contains an empty address: separate addresses by single commas"
        )
    return hosts


def parse_port(text: str) -> int:
    """A port; 0 where that has a meaning. Raises argparse.ArgumentTypeError. Some event loops would
    take the lower 16 bits of larger numbers and listen there."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port: it must be from 0 to 65535")
    return int(text)
