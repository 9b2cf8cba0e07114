"""Draws the GPUs of every node, colored by role and framed by instance. Pure SVG and HTML."""

from collections.abc import Iterator
from html import escape

from cleave.api.role import Role
from cleave.report.layout import LayoutNode, Segment

_CELL = 34
_GAP = 4
_FRAME = 2
_TOP = 14
_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D", Role.MIXED: "M"}
_MAX_NODES = 32
"""Most nodes that are drawn; more would not be readable."""


def draw_nodes(nodes: tuple[LayoutNode, ...]) -> str:
    """All nodes as one list; above the limit, the first ones and a sentence."""
    items = "".join(
        f'<li><span class="node-name">node {number} <small>{escape(node.gpu)}</small></span>'
        f"{_draw_node(node, number)}</li>"
        for number, node in enumerate(nodes[:_MAX_NODES])
    )
    hidden = len(nodes) - _MAX_NODES
    more = f'<p class="note">... and {hidden} more nodes of the same kind.</p>'
    return f'<ol class="nodes" start="0">{items}</ol>{more if hidden > 0 else ""}'


def describe_node(node: LayoutNode) -> str:
    """What runs on a node, such as `prefill 0 (stage 0) on 2 GPUs; 6 free`."""
    parts = [
        f"{s.role} {s.instance} ({'rank' if s.is_rank else 'stage'} {s.stage}) on "
        f"{s.gpus} GPU{'s' if s.gpus > 1 else ''}"
        for s in node.segments
    ]
    return "; ".join([*parts, *([f"{node.free} free"] if node.free else [])])


def _draw_node(node: LayoutNode, number: int) -> str:
    width, height = node.gpus * _CELL + _GAP, _CELL + _TOP + _GAP
    label = escape(f"node {number}: {describe_node(node)}")
    return (
        f'<svg class="node" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}"><title>{label}</title>{"".join(_draw_gpus(node))}</svg>'
    )


def _draw_gpus(node: LayoutNode) -> Iterator[str]:
    first_gpu = 0
    for segment in node.segments:
        yield from _draw_segment(segment, first_gpu)
        first_gpu += segment.gpus
    for free in range(first_gpu, node.gpus):
        yield _draw_cell(free, "free", "")


def _draw_segment(segment: Segment, first_gpu: int) -> Iterator[str]:
    name = f"{_LETTERS[segment.role]}{segment.instance}"
    for gpu in range(segment.gpus):
        yield _draw_cell(first_gpu + gpu, str(segment.role), name)
    x, width = first_gpu * _CELL + _FRAME, segment.gpus * _CELL - _FRAME
    yield (
        f'<rect class="frame {segment.role}" x="{x}" y="{_TOP}" width="{width}" '
        f'height="{_CELL}" rx="6"/>'
        f'<text class="stage" x="{x + 3}" y="{_TOP - 4}">'
        f"{'r' if segment.is_rank else 's'}{segment.stage}</text>"
    )


def _draw_cell(index: int, kind: str, text: str) -> str:
    x, y, size = index * _CELL + _GAP, _TOP + _GAP // 2, _CELL - _GAP - _FRAME // 2
    return (
        f'<rect class="gpu {kind}" x="{x}" y="{y}" width="{size - 1}" height="{size}" rx="4"/>'
        f'<text class="gpu-name" x="{x + size / 2}" y="{y + size / 2 + 4}">{text}</text>'
    )
