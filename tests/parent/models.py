"""Model folders as small as they can be, for tests of the library and the commands."""

import struct
from pathlib import Path
from typing import Any

import msgspec

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.library import Library

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def write_model(
    folder: Path,
    *,
    dtype: str = "BF16",
    card: dict[str, Any] | None = None,
    tensor: str = "model.embed_tokens.weight",
    **config: Any,
) -> Path:
    """A folder that `inspect` accepts: real headers, zeros for weights. `card` becomes `mlxd.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    payload = bytes(100 * 64 * {"F32": 4, "BF16": 2, "F16": 2}[dtype])
    info = {"dtype": dtype, "shape": [100, 64], "data_offsets": [0, len(payload)]}
    header = msgspec.json.encode({tensor: info})
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + payload)
    if card is not None:
        (folder / "mlxd.json").write_bytes(msgspec.json.encode(card))
    return folder


def scan(data_dir: Path) -> list[ModelEntry]:
    """The own models of a data folder, by id."""
    library = Library(lambda: Settings(data_dir=data_dir, hf_cache="none"), dict)
    library.scan()
    return library.entries
