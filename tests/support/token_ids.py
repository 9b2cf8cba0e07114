"""Ids of the tokens that a transcript has kept."""

from cleave.gateway.failover.transcript import Transcript


def list_ids(transcript: Transcript) -> list[int]:
    """Ids of all output tokens."""
    ids = transcript.output_ids.replace(b"]", b",").split(b",")
    return [int(each) for each in ids if each]
