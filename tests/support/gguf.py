"""Writes small GGUF files, in the shape of the demo's model."""

import random
import struct
from typing import Any

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
F32, Q4_1, Q8_0 = 0, 3, 8


def pack_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pack_value(value: Any) -> bytes:
    """A value with its type before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    kind = {int: 5, str: 8}[type(value[0])]
    items = (struct.pack("<i", each) if kind == 5 else pack_string(each) for each in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)


def pack(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A file of these values, and of tensors: shape with rows first, encoding, bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(pack_string(name) + pack_value(each) for name, each in metadata.items())
    data = b""
    for name, (shape, encoding, raw) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += pack_string(name) + sizes + struct.pack("<IQ", encoding, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def make_blocks(encoding: int, count: int, rng: random.Random) -> bytes:
    """Random weights."""
    if encoding == F32:
        return struct.pack(f"<{count}f", *(rng.gauss(0, 1) for _ in range(count)))
    scales = "2e" if encoding == Q4_1 else "e"
    quants = 16 if encoding == Q4_1 else 32
    return b"".join(
        struct.pack(f"<{scales}", *(rng.uniform(-1, 1) for _ in scales.replace("2e", "ee")))
        + rng.randbytes(quants)
        for _ in range(count // 32)
    )


def make_model(words: list[str], merges: list[str]) -> bytes:
    """A model of one layer with two heads over one of keys, and these tokens besides bytes."""
    tokens = [*CONTROL, *words]
    hidden, mlp, head = 64, 96, 32
    rng = random.Random(1)
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "token_embd": ((len(tokens), hidden), Q8_0),
        "output_norm": ((hidden,), F32),
        "blk.0.attn_norm": ((hidden,), F32),
        "blk.0.attn_q": ((2 * head, hidden), Q4_1),
        "blk.0.attn_k": ((head, hidden), Q4_1),
        "blk.0.attn_v": ((head, hidden), Q4_1),
        "blk.0.attn_output": ((hidden, hidden), Q4_1),
        "blk.0.ffn_norm": ((hidden,), F32),
        "blk.0.ffn_gate": ((mlp, hidden), Q4_1),
        "blk.0.ffn_up": ((mlp, hidden), Q4_1),
        "blk.0.ffn_down": ((hidden, mlp), Q4_1),
    }
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.add_bos_token": False,
        "llama.vocab_size": len(tokens),
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": mlp,
        "llama.block_count": 1,
        "llama.context_length": 512,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * len(words),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    tensors = {}
    for name, (shape, encoding) in shapes.items():
        count = shape[0] * shape[1] if len(shape) > 1 else shape[0]
        tensors[f"{name}.weight"] = (shape, encoding, make_blocks(encoding, count, rng))
    return pack(metadata, tensors)
