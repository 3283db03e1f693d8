"""Writes GGUF files for tests, in plain Python: an oracle for the reader that shares no code with it."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import checkpoints, weights

NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XS": 17,
    "BF16": 30,
    "MXFP4": 39,
}


class Raw:
    """Tensor bytes of a given type, with the shape they stand for and the values they mean."""

    def __init__(self, kind: str, shape: tuple[int, ...], data: bytes, values: NDArray[np.float32]) -> None:
        self.kind, self.shape, self.data, self.values = kind, shape, data, values


def floats(kind: str, values: NDArray[Any]) -> Raw:
    """F32, F16 or BF16 (cut, so the caller gives values that bfloat16 has)."""
    if kind == "BF16":
        cut = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return Raw(kind, values.shape, cut.tobytes(), (cut.astype("<u4") << 16).view("<f4"))
    stored = values.astype({"F32": "<f4", "F16": "<f2"}[kind])
    return Raw(kind, values.shape, stored.tobytes(), stored.astype(np.float32))


def blocks(kind: str, shape: tuple[int, int], seed: int) -> Raw:
    """Random blocks of a quantized type; the values by the definition, one number after another."""
    random = np.random.RandomState(seed)
    data = bytearray()
    values: list[float] = []
    for _ in range(shape[0] * shape[1] // 32):
        scale = np.float16(random.uniform(0.001, 0.02))
        low = np.float16(random.uniform(-0.2, 0.0))
        if kind == "Q8_0":
            codes = random.randint(-128, 128, 32)
            data += struct.pack("<e32b", scale, *codes)
            values += [float(scale) * int(code) for code in codes]
            continue
        codes = random.randint(0, 16, 32)
        data += struct.pack("<e", scale)
        if kind == "Q4_1":
            data += struct.pack("<e", low)
            values += [float(np.float32(float(scale) * int(code) + float(low))) for code in codes]
        else:
            values += [float(scale) * (int(code) - 8) for code in codes]
        data += bytes(int(codes[i]) | int(codes[i + 16]) << 4 for i in range(16))
    return Raw(kind, shape, bytes(data), np.array(values, np.float32).reshape(shape))


def text(value: str) -> bytes:
    """A GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """Type number and bytes of a metadata value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    kinds = {str: 8, int: 5, float: 6}
    kind = kinds[type(value[0])] if value else 8
    form = {5: "<i", 6: "<f"}.get(kind)
    body = b"".join(text(one) if form is None else struct.pack(form, one) for one in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + body


def encode(
    metadata: dict[str, Any], tensors: dict[str, Raw], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    body = b""
    for name, raw in tensors.items():
        body += b"\0" * (-len(body) % alignment)
        head += text(name) + struct.pack("<I", len(raw.shape))
        head += b"".join(struct.pack("<Q", n) for n in reversed(raw.shape))
        head += struct.pack("<IQ", NUMBERS[raw.kind], len(body))
        body += raw.data
    return head + b"\0" * (-len(head) % alignment) + body


def tokenizer_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """The oracle cases' tokenizer as GGUF metadata."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": checkpoints.tokens(),
        "tokenizer.ggml.token_type": [
            3 if token in checkpoints.SPECIALS else 1 for token in checkpoints.tokens()
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in checkpoints.MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": checkpoints.CHAT_TEMPLATE,
        **more,
    }


def llama_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """A case's config as GGUF metadata."""
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


GGUF_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in GGUF_PARTS:
        return f"{GGUF_PARTS[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{leaf}"


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to the rows of q and k."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def case_tensors(name: str, kind: str = "F32") -> tuple[dict[str, Any], dict[str, Raw], weights.Tensors]:
    """Metadata and tensors of an oracle case, and the same values under Hugging Face's names and order.

    Matrices are of `kind` (norms and biases F32); a quantized kind gets random blocks instead of the case's
    weights.
    """
    config, seed = checkpoints.case(name)
    tensors: dict[str, Raw] = {}
    expected: weights.Tensors = {}
    for number, (key, value) in enumerate(weights.build(config, seed).items()):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        ours = next((config[count] for part, count in heads.items() if part in key), 0)
        if value.ndim == 2 and kind.startswith("Q"):
            raw = blocks(kind, (value.shape[0], value.shape[1]), number)
        else:
            stored = permuted(value, ours) if ours else value
            raw = floats(kind if value.ndim == 2 else "F32", stored)
        tensors[gguf_name(key)] = raw
        back = raw.values
        if ours:  # the inverse: halves out of pairs
            back = back.reshape(ours, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
        expected[key] = back
    return {**llama_metadata(config), **tokenizer_metadata()}, tensors, expected


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Raw]) -> Path:
    """Write the file; gives its path."""
    path.write_bytes(encode(metadata, tensors))
    return path
