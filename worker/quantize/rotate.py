"""Turning the residual stream by a random orthogonal matrix, so that no single channel stands out before quantizing.

With R such a matrix, h becomes h R everywhere between two layers: what writes into the stream is multiplied by it, what
reads from it by its inverse, and the graph stays the same (QuaRot, Ashkboos et al. 2024; the rotation R1 of SpinQuant,
Liu et al. 2024). An RMS norm commutes with R once its weights are 1, so these go into the matrices behind it. The norm
before the head makes that another matrix than the embedding, where both were one.
"""

import math

import mlx.core as mx
import numpy as np

from shared.errors import ErrorCode, refuse
from worker.quantize.layout import Source, Tensors, layer_of

FAMILIES = (
    *("llama", "mistral", "ministral3", "smollm3", "qwen2", "qwen3", "phi3"),
    *("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"),
)
"""Those with norms before attention and MLP and nowhere else in the stream."""

_BEFORE_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
_BEFORE_MLP = ("gate_proj", "up_proj", "gate_up_proj", "gate")
_WRITERS = ("o_proj", "down_proj")
_ATTENTION_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"


class Rotation:
    """R = S (O x H) of `size` channels: random signs, a random orthogonal matrix of the odd part of `size`, and the
    Hadamard matrix of its even part. What is the same for a seed and a size.
    """

    def __init__(self, size: int, seed: int) -> None:
        stream = np.random.RandomState(seed)
        self.even = size & -size
        self.odd = size // self.even
        self.signs = mx.array(np.where(stream.random_sample(size) < 0.5, -1, 1).astype(np.float32))
        q, r = np.linalg.qr(stream.standard_normal((self.odd, self.odd)))
        self.mixing = mx.array((q * np.sign(np.diag(r))).astype(np.float32))

    def __call__(self, x: mx.array) -> mx.array:
        """`x` [..., size] R, in float32."""
        turned = (x.astype(mx.float32) * self.signs).reshape(*x.shape[:-1], self.odd, self.even)
        if self.odd > 1:
            turned = (turned.swapaxes(-1, -2) @ self.mixing).swapaxes(-1, -2)
        turned = mx.hadamard_transform(mx.contiguous(turned), scale=1 / math.sqrt(self.even))
        return turned.reshape(x.shape)


def rotate(source: Source, seed: int) -> None:
    """Turn the stream of `source`. Raises `Refused` (unsupported) where its graph does not allow it.

    Tensors come out in float32 where they were touched; the logits are the same but for rounding.
    """
    if source.family not in FAMILIES:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{source.checkpoint.path}: models of family {source.family!r} cannot be rotated, because their residual "
            f"stream meets more than norms before attention and MLP; those that can: {', '.join(FAMILIES)}",
            param="rotate",
        )
    tensors = source.tensors
    if "embed_tokens.weight" in tensors:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{source.checkpoint.path}: was saved without its head, as models for vectors are, which need their stream "
            "as it is; leave rotate out",
            param="rotate",
        )
    turn = Rotation(int(source.config["hidden_size"]), seed)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    tensors["lm_head.weight"] = turn(_folded(head, tensors["model.norm.weight"]))
    tensors["model.embed_tokens.weight"] = turn(embedding)
    tensors["model.norm.weight"] = mx.ones_like(tensors["model.norm.weight"])
    norms = {
        name: tensor
        for name, tensor in tensors.items()
        if layer_of(name) is not None and name.endswith((_ATTENTION_NORM, _MLP_NORM))
    }
    for name, tensor in list(tensors.items()):
        if layer_of(name) is not None and name not in norms:
            tensors[name] = _turned(name, tensor, norms, turn)
    for name, tensor in norms.items():
        tensors[name] = mx.ones_like(tensor)
    for config in (source.config, source.written):
        config["tie_word_embeddings"] = False


def _turned(name: str, tensor: mx.array, norms: Tensors, turn: Rotation) -> mx.array:
    """A tensor of a layer as the turned stream needs it."""
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    prefix = f"model.layers.{layer_of(name)}"
    if last in _WRITERS:
        return turn(tensor.swapaxes(-1, -2)).swapaxes(-1, -2) if leaf == "weight" else turn(tensor)
    norm = _norm_before(module, last)
    if norm and leaf == "weight":
        return turn(_folded(tensor, norms[f"{prefix}.{norm}"]))
    return tensor


def _norm_before(module: str, last: str) -> str:
    """The norm whose output a module reads, "" = it does not read from the stream."""
    if ".self_attn." in module:
        return _ATTENTION_NORM if last in _BEFORE_ATTENTION else ""
    return _MLP_NORM if ".mlp." in module and last in _BEFORE_MLP else ""


def _folded(weight: mx.array, norm: mx.array) -> mx.array:
    """A matrix [..., out, in] behind a norm as one behind a norm of ones."""
    return weight.astype(mx.float32) * norm.astype(mx.float32)
