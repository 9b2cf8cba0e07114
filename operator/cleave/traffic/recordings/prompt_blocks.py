"""The blocks that recorded prompts share, from the hashes in a recording.

Called by `history`. What is hard: hashes of blocks chain, so a file in which a block follows two
different ones is not a recording.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.simulator.trace import PromptBlocks
from cleave.traffic.recordings.request_fields import (
    MOONCAKE_BLOCK_TOKENS,
    FieldRole,
    PublishedFormat,
)
from cleave.traffic.recordings.request_numbers import read_counts
from cleave.traffic.recordings.request_table import RequestTable, format_value


def read_blocks(
    table: RequestTable,
    prompt_tokens: NDArray[np.int64],
    published: PublishedFormat | None = None,
) -> tuple[PromptBlocks | None, tuple[str, ...]]:
    """The blocks that prompts share, None if the file has no hashes; and remarks. `published`:
    knows their size where the file does not state it. Raises HistoryError."""
    fields = table.select(FieldRole.HASHES)
    if not fields:
        return None, ()
    path, block_tokens = fields[0].path, _read_block_tokens(table, published)
    # In order of appearance: the blocks of a prompt lie side by side in the simulator's memory.
    found: dict[object, int] = {}
    numbers: list[int] = []
    starts = [0]
    for at, cell in enumerate(table.cells[path]):
        hashes = _parse_hashes(cell)
        if hashes is None or not set(map(type, hashes)) <= {int, str}:
            what = f"{path} {format_value(cell)}: must be a list of numbers or texts"
            raise table.build_error(at, f"{what}; correct it, or drop the column")
        if len(hashes) > -(-int(prompt_tokens[at]) // block_tokens):
            what = f"{path} has {len(hashes)} hashes, more than {prompt_tokens[at]} prompt tokens"
            remedy = "state the tokens per hash as hash_block_tokens"
            raise table.build_error(at, f"{what} have blocks of {block_tokens}; {remedy}")
        numbers += [found.setdefault(each, len(found)) for each in hashes]
        starts.append(len(numbers))
    blocks = PromptBlocks(block_tokens, np.array(starts), np.array(numbers, np.int64), len(found))
    _check_chains(table, path, blocks, prompt_tokens)
    missing = sum(cell in (None, "") for cell in table.cells[path])
    what = f"{missing:,} of {len(table):,} requests have no {path}: nothing of them repeats"
    return blocks if found else None, (what,) if missing else ()


def _parse_hashes(cell: object) -> list[object] | None:
    """The list in a cell, which a CSV file has as text; None: it is none."""
    if cell in (None, ""):
        return []
    try:
        hashes = msgspec.json.decode(cell) if isinstance(cell, str) else cell
    except msgspec.DecodeError:
        return None
    return hashes if isinstance(hashes, list) else None


def _read_block_tokens(table: RequestTable, published: PublishedFormat | None) -> int:
    fields = table.select(FieldRole.BLOCK_TOKENS)
    if not fields:
        return published.block_tokens if published else MOONCAKE_BLOCK_TOKENS
    name = fields[0].path
    rows = [at for at, cell in enumerate(table.cells[name]) if cell not in (None, "")]
    tokens = read_counts(table.take(np.array(rows, np.int64)), name)
    other = np.flatnonzero(tokens != tokens[0])
    if len(other):
        at = int(other[0])
        what = f"{name} {tokens[at]}: must be {tokens[0]} as in the lines above; hash all alike"
        raise table.build_error(rows[at], what)
    return int(tokens[0])


def _check_chains(
    table: RequestTable, path: str, blocks: PromptBlocks, prompt_tokens: NDArray[np.int64]
) -> None:
    """Reject a block that follows different blocks, or has different lengths."""
    numbers, starts = blocks.numbers, blocks.starts
    owner = np.repeat(np.arange(len(prompt_tokens)), np.diff(starts))
    position = np.arange(len(numbers)) - starts[owner]
    previous = np.where(position > 0, np.roll(numbers, 1), -1)
    length = np.minimum(blocks.block_tokens, prompt_tokens[owner] - position * blocks.block_tokens)
    _, first = np.unique(numbers, return_index=True)
    seen = first[numbers] if len(numbers) else first
    wrong = np.flatnonzero((previous != previous[seen]) | (length != length[seen]))
    if len(wrong):
        at = int(wrong[0])
        hashes = _parse_hashes(table.cells[path][owner[at]]) or []
        value = hashes[position[at]]
        what = f"{path}[{position[at]}] {format_value(value)} is the hash of another"
        remedy = "hash each block together with all blocks before it"
        raise table.build_error(
            int(owner[at]), f"{what} block in line {table.lines[owner[seen[at]]]}; {remedy}"
        )
