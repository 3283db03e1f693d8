"""Oracle cases of encoders as model directories: `write_case("bert", folder)`, and `reference(name)`.

A case is a folder of `encoder_cases/`: `case.json` (seed and config) and `reference.safetensors`, made by
`tests/oracles/make_encoders.py`. Weights are rebuilt from the seed, as those of decoders are.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.oracles.checkpoints import SPECIALS, VOCAB_SIZE, write_tokenizer
from tests.oracles.weights import tensor

CASES = Path(__file__).with_name("encoder_cases")
CLS, SEP = 5, 6

Config = dict[str, Any]
Arrays = dict[str, NDArray[Any]]

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "a",
    "It naps; and then the hat is in the other house, where nobody looks for it.",
    "東京 é",
)
PAIRS = tuple((TEXTS[0], text) for text in TEXTS[1:])


def encoder(model_type: str, architecture: str, **more: Any) -> Config:
    """A small config with `more` on top."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "max_position_embeddings": 128,
        "type_vocab_size": 2 if model_type == "bert" else 1,
        "layer_norm_eps": 1e-12 if model_type == "bert" else 1e-5,
        "pad_token_id": 0 if model_type == "bert" else 1,
        "bos_token_id": CLS,
        "eos_token_id": SEP,
        **more,
    }


ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a bare model's tensors, and of the classifier where it has one."""
    size, wide = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
    }
    norms, linears = ["embeddings.LayerNorm"], {}
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for name in ("query", "key", "value"):
            linears[f"{layer}.attention.self.{name}"] = (size, size)
        linears[f"{layer}.attention.output.dense"] = (size, size)
        linears[f"{layer}.intermediate.dense"] = (wide, size)
        linears[f"{layer}.output.dense"] = (size, wide)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    if is_reranker(config) and config["model_type"] == "bert":
        linears |= {"pooler.dense": (size, size), "classifier": (1, size)}
    elif is_reranker(config):
        linears |= {"classifier.dense": (size, size), "classifier.out_proj": (1, size)}
    for name in norms:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (size,)
    for name, shape in linears.items():
        found[f"{name}.weight"], found[f"{name}.bias"] = shape, shape[:1]
    return found


def is_reranker(config: Config) -> bool:
    return str(config["architectures"][0]).endswith("ForSequenceClassification")


def build(config: Config, seed: int) -> Arrays:
    """All tensors, float32, under the names of a bare model."""
    return {name: tensor(name, shape, seed, tied=False) for name, shape in shapes(config).items()}


def named(tensors: Arrays, config: Config) -> Arrays:
    """The same under the names that the architecture of the config has: a reranker is a model around one."""
    prefix = {"bert": "bert."}.get(config["model_type"], "roberta.") if is_reranker(config) else ""
    return {
        name if name.startswith("classifier") else f"{prefix}{name}": value for name, value in tensors.items()
    }


def names() -> list[str]:
    """Every case, in order."""
    return sorted(folder.name for folder in CASES.iterdir())


def case(name: str) -> tuple[Config, int]:
    """Its config and the seed of its weights."""
    stored = json.loads((CASES / name / "case.json").read_text())
    return stored["config"], stored["seed"]


def reference(name: str) -> Arrays:
    """`ids`, `types` [B, L] and `lengths` [B] of `TEXTS` or `PAIRS`, padded with zeros; `hidden` [B, L, D] of each text
    alone; `mean`, `cls`, `max`, `last` [B, D] of these, or of a reranker `logits` [B].
    """
    return safetensors.numpy.load_file(CASES / name / "reference.safetensors")


def write_case(name: str, folder: Path, **files: Any) -> Path:
    """Write a case as a model directory; `files`: JSON of further ones, `1_Pooling__config` for one in a folder."""
    config, seed = case(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(named(build(config, seed), config), folder / "model.safetensors")
    write_encoder_tokenizer(folder)
    for path, data in files.items():
        file = folder / f"{path.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(data))
    return folder


def write_encoder_tokenizer(folder: Path) -> Tokenizer:
    """The tests' tokenizer, which puts a mark at the beginning and at the end of each text."""
    write_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, end = SPECIALS[CLS], SPECIALS[SEP]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(first, CLS), (end, SEP)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def padded(rows: list[list[int]]) -> NDArray[np.int32]:
    """`[B, L]`, zeros behind."""
    longest = max(map(len, rows))
    return np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
