"""Adapters as mlx-lm itself writes them, against mlx-lm's own logits."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from tests.adapters import same
from tests.oracles.checkpoints import reference, write_case
from tests.worker.models.running import logits_of
from worker.adapters.mount import Adapters
from worker.models import load_model

PROMPT = reference("llama_tied")["input_ids"]


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_lm_gives_mlx_lms_logits(kind: str, quantized: bool, tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model as load_theirs

    how = {"group_size": 32, "bits": 8, "mode": "affine"} if quantized else None
    model = write_case("llama_tied", tmp_path / "model", quantize=how)
    theirs = load_theirs(model)[0]
    theirs.freeze()
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(theirs, len(theirs.layers), parameters, use_dora=kind == "dora")
    mx.random.seed(3)
    theirs.update(
        tree_map(lambda one: one + mx.random.normal(one.shape) * 0.05, theirs.trainable_parameters())
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    mx.save_safetensors(
        str(folder / "adapters.safetensors"), dict(tree_flatten(theirs.trainable_parameters()))
    )
    config = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, "model": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    expected = theirs(mx.array(PROMPT)[None])[0]

    loaded = load_model(model)
    held = Adapters(loaded.linears, loaded.parts, loaded.dtype, "m")
    info = held.mount("a", str(folder))
    assert (info.kind, info.rank, info.scale) == (kind, 4, 2.0)
    held.selection.choose([(("a",), 1)])
    assert same(logits_of(loaded.model, PROMPT, [1 << 30]), expected) <= (1e-4 if quantized else 2e-5)
