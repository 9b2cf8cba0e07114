"""Addresses to listen on, as `--host` names them; read by the gateway's and operator's main."""

import argparse


def parse_hosts(text: str) -> tuple[str, ...]:
    """Addresses or host names separated by commas. Raises argparse.ArgumentTypeError."""
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts):
        raise argparse.ArgumentTypeError(
            f"{text!r} contains an empty address: separate addresses by single commas"
        )
    return hosts
