"""Remake the stored references of encoders with torch and Hugging Face transformers; see `make.py` for the environment.

ref/bin/python -m tests.oracles.make_encoders [CASE ... | FOLDER OF all-MiniLM-L6-v2]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.oracles import encoders
from tests.oracles.encoders import ONE_LABEL, encoder

CASE_TABLE: dict[str, dict[str, Any]] = {
    "bert": encoder("bert", "BertModel"),
    "roberta": encoder("roberta", "RobertaModel"),
    "xlm_roberta": encoder("xlm-roberta", "XLMRobertaModel", num_hidden_layers=3),
    "bert_gelu_new": encoder("bert", "BertModel", hidden_act="gelu_new", num_attention_heads=2),
    "bert_reranker": encoder("bert", "BertForSequenceClassification", **ONE_LABEL),
    "xlm_roberta_reranker": encoder("xlm-roberta", "XLMRobertaForSequenceClassification", **ONE_LABEL),
}
SEED = 1


def make(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Each text alone, so that no mask is needed."""
    cls = getattr(transformers, config["architectures"][0])
    known = {key: value for key, value in config.items() if key != "architectures"}
    model = cls(cls.config_class(**known)).float().eval()
    model.config._attn_implementation = "eager"
    weights = encoders.named(encoders.build(config, SEED), config)
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(value) for name, value in weights.items()}, strict=False
    )
    assert not unexpected, unexpected
    assert all("pooler" in name or "position_ids" in name or "token_type_ids" in name for name in missing), (
        missing
    )
    ranks = encoders.is_reranker(config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = encoders.write_encoder_tokenizer(Path(folder))
    texts = (
        [tokenizer.encode(*pair) for pair in encoders.PAIRS]
        if ranks
        else map(tokenizer.encode, encoders.TEXTS)
    )
    ids, types, outs = [], [], []
    for text in texts:
        kinds = text.type_ids if config["type_vocab_size"] > 1 else [0] * len(text.ids)
        ids.append(text.ids)
        types.append(kinds)
        with torch.no_grad():
            outs.append(model(input_ids=torch.tensor([text.ids]), token_type_ids=torch.tensor([kinds])))
    lengths = np.array([len(row) for row in ids], np.int32)
    found = {"ids": encoders.padded(ids), "types": encoders.padded(types), "lengths": lengths}
    if ranks:
        return found | {"logits": np.array([float(out.logits[0, 0]) for out in outs], np.float32)}
    states = [out.last_hidden_state[0].numpy() for out in outs]
    hidden = np.zeros((len(ids), lengths.max(), config["hidden_size"]), np.float32)
    for row, state in enumerate(states):
        hidden[row, : len(state)] = state
    return found | {
        "hidden": hidden,
        "mean": np.stack([state.mean(0) for state in states]),
        "cls": np.stack([state[0] for state in states]),
        "max": np.stack([state.max(0) for state in states]),
        "last": np.stack([state[-1] for state in states]),
    }


MINILM = Path(__file__).parents[1] / "e2e" / "minilm_vectors.json"
MINILM_TEXTS = (
    "hello world",
    "What is the capital of France?",
    "The capital of France is Paris.",
    "Cats sleep for most of the day. " * 20,
    "東京 é 👩‍👩‍👧 naïve",
)


def make_minilm(folder: str) -> None:
    """The vectors of the real model: the mean of its states at unit length."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = transformers.BertModel.from_pretrained(folder).float().eval()
    found = []
    for text in MINILM_TEXTS:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        vector = [round(value, 7) for value in (mean / mean.norm()).tolist()]
        found.append({"text": text, "tokens": len(ids), "vector": vector})
    MINILM.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


def main(wanted: list[str]) -> None:
    """Make the named cases, or all."""
    if wanted and Path(wanted[0]).is_dir():
        make_minilm(wanted[0])
        return
    for name in wanted or list(CASE_TABLE):
        folder = encoders.CASES / name
        folder.mkdir(parents=True, exist_ok=True)
        found = make(CASE_TABLE[name])
        stored = json.dumps({"seed": SEED, "config": CASE_TABLE[name]}, indent=1)
        (folder / "case.json").write_text(stored + "\n", encoding="utf-8")
        save_file(found, folder / "reference.safetensors")
        print(name, {key: value.shape for key, value in found.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
