"""Encoders against Hugging Face transformers: hidden states, every pooling, scores, however texts are grouped."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shared.checkpoint import inspect
from shared.errors import ErrorCode, Refused
from tests.oracles import checkpoints, encoders
from worker.embed import forward
from worker.embed.pooling import Collector, Head, cut, unit
from worker.embed.sentence import Sentence, read_sentence
from worker.embed.texts import Ids
from worker.models import ENCODERS, load_encoder

TOLERANCE = 1e-5
READERS = [name for name in encoders.names() if not encoders.is_reranker(encoders.case(name)[0])]
RANKERS = [name for name in encoders.names() if name not in READERS]


def load(name: str, folder: Path, **how: Any) -> Any:
    return load_encoder(inspect(encoders.write_case(name, folder, **how)))


def texts_of(expected: dict[str, Any]) -> list[Ids]:
    rows = zip(
        expected["ids"].tolist(), expected["types"].tolist(), expected["lengths"].tolist(), strict=True
    )
    return [Ids(ids[:length], types[:length]) for ids, types, length in rows]


def test_oracle_there_is_a_case_of_every_family() -> None:
    assert {encoders.case(name)[0]["model_type"] for name in encoders.names()} == set(ENCODERS)


@pytest.mark.parametrize("name", READERS)
def test_oracle_hidden_states_of_a_padded_group_are_those_of_each_text_alone(
    name: str, tmp_path: Path
) -> None:
    expected = encoders.reference(name)
    model = load(name, tmp_path).model
    lengths = expected["lengths"].tolist()
    noise = np.where(expected["ids"] == 0, 7, expected["ids"])  # what stands at padding must not matter
    found = np.array(model(mx.array(noise), mx.array(expected["types"]), lengths))
    for row, length in enumerate(lengths):
        assert np.abs(found[row, :length] - expected["hidden"][row, :length]).max() < TOLERANCE


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "last"])
@pytest.mark.parametrize("name", READERS)
def test_oracle_pooling_of_a_group_and_piece_by_piece(name: str, mode: str, tmp_path: Path) -> None:
    expected = encoders.reference(name)
    loaded = load(name, tmp_path)
    head = Head(Sentence((mode,), normalize=False), loaded.model.width)
    rows = forward.vectors(loaded.model, head, texts_of(expected), 0)
    found = np.stack([np.frombuffer(row, np.float32) for row in rows])
    assert np.abs(found - expected[mode]).max() < TOLERANCE
    for row, length in enumerate(expected["lengths"].tolist()):
        for piece in (1, 2, 7, length):
            collector = head.collector(0).fresh()
            for begin in range(0, length, piece):
                end = min(length, begin + piece)
                collector.take(mx.array(expected["hidden"][row, begin:end]))
            assert np.abs(np.array(collector.result()) - expected[mode][row]).max() < TOLERANCE


@pytest.mark.parametrize("name", RANKERS)
def test_oracle_scores_of_a_reranker(name: str, tmp_path: Path) -> None:
    expected = encoders.reference(name)
    found = forward.scores(load(name, tmp_path).model, texts_of(expected))
    assert np.abs(np.array(found) - 1 / (1 + np.exp(-expected["logits"]))).max() < TOLERANCE


def test_mean_by_the_root_of_the_length_and_two_poolings_side_by_side() -> None:
    hidden = np.random.RandomState(0).rand(2, 4, 3).astype(np.float32)
    head = Head(Sentence(("mean_sqrt_len", "cls"), normalize=False), 3)
    found = np.array(head.pool(mx.array(hidden), [4, 2]))
    assert head.width == 6
    assert np.allclose(found[:, :3], [hidden[0].sum(0) / 2, hidden[1, :2].sum(0) / 2**0.5], atol=1e-6)
    assert np.allclose(found[:, 3:], hidden[:, 0])
    collector = Collector(head, cut(0))
    collector.take(mx.array(hidden[1, :1]))
    collector.take(mx.array(hidden[1, 1:2]))
    assert np.allclose(np.array(collector.result()), found[1], atol=1e-6)


def test_dimensions_are_cut_and_made_unit_length_again() -> None:
    x = mx.array([[3.0, 4.0, 5.0], [0.0, 0.0, 1.0]])
    assert np.allclose(np.array(cut(2)(x)), [[0.6, 0.8], [0, 0]])
    assert cut(0)(x) is x
    assert np.allclose(np.linalg.norm(np.array(unit(x)), axis=1), 1)


def test_a_dense_module_follows_pooling(tmp_path: Path) -> None:
    import safetensors.numpy

    stream = np.random.RandomState(0)
    weight, bias = stream.rand(5, 32).astype(np.float32), stream.rand(5).astype(np.float32)
    folder = encoders.write_case(
        "bert",
        tmp_path,
        modules=[
            {"type": "sentence_transformers.models.Transformer", "path": ""},
            {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
            {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
        ],
        **{
            "1_Pooling__config": {"pooling_mode_cls_token": True},
            "2_Dense__config": {
                "in_features": 32,
                "out_features": 5,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        },
    )
    dense = {"linear.weight": weight, "linear.bias": bias}
    safetensors.numpy.save_file(dense, folder / "2_Dense" / "model.safetensors")
    sentence = read_sentence(folder, is_encoder=True)
    assert (sentence.pooling, sentence.normalize) == (("cls",), False)
    pooled = stream.rand(2, 32).astype(np.float32)
    found = np.array(Head(sentence, 32).finish(mx.array(pooled)))
    assert np.allclose(found, np.tanh(pooled @ weight.T + bias), atol=1e-5)


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


@pytest.mark.parametrize(
    ("files", "pooling", "normalize"),
    [
        ({}, ("mean",), True),
        ({"modules": MODULES}, ("mean",), True),
        ({"modules": MODULES[:2]}, ("mean",), False),
        ({"1_Pooling/config": {"pooling_mode_lasttoken": True}}, ("last",), True),
        ({"modules": MODULES, "1_Pooling/config": {"pooling_mode": "max"}}, ("max",), True),
        (
            {"modules": MODULES, "1_Pooling/config": {"pooling_mode": ["cls", "lasttoken"]}},
            ("cls", "last"),
            True,
        ),
        (
            {"modules": MODULES, "1_Pooling/config": {"pooling_mode_mean_sqrt_len_tokens": True}},
            ("mean_sqrt_len",),
            True,
        ),
    ],
)
def test_pooling_is_that_of_the_models_files(
    tmp_path: Path, files: dict[str, Any], pooling: tuple[str, ...], normalize: bool
) -> None:
    write(tmp_path, files)
    found = read_sentence(tmp_path, is_encoder=True)
    assert (found.pooling, found.normalize) == (pooling, normalize)


@pytest.mark.parametrize(
    ("files", "told", "code"),
    [
        ({"modules": {}}, "not a list of modules", ErrorCode.BAD_CHECKPOINT),
        (
            {"modules": [{"type": "x.Pooling", "path": "../.."}]},
            "not in this directory",
            ErrorCode.BAD_CHECKPOINT,
        ),
        ({"modules": [{"type": "x.LSTM", "path": "1"}]}, "module LSTM", ErrorCode.UNSUPPORTED),
        (
            {"1_Pooling/config": {"pooling_mode_weightedmean_tokens": True}},
            "weightedmean",
            ErrorCode.UNSUPPORTED,
        ),
        ({"1_Pooling/config": {"include_prompt": False}}, "include_prompt", ErrorCode.UNSUPPORTED),
        ({"1_Pooling/config": []}, "not a JSON object", ErrorCode.BAD_CHECKPOINT),
        ({"1_Pooling/config": [1]}, "not a JSON object", ErrorCode.BAD_CHECKPOINT),
        ({"modules": [{"type": "x.Dense", "path": "2"}]}, "in_features", ErrorCode.BAD_CHECKPOINT),
        ({"config_sentence_transformers": {"prompts": {"a": 1}}}, "prompts", ErrorCode.BAD_CHECKPOINT),
        ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "'q'", ErrorCode.BAD_CHECKPOINT),
    ],
)
def test_files_that_mean_nothing_are_refused_by_name(
    tmp_path: Path, files: dict[str, Any], told: str, code: ErrorCode
) -> None:
    write(tmp_path, files)
    with pytest.raises(Refused, match=told) as refused:
        read_sentence(tmp_path, is_encoder=True)
    assert refused.value.failure.code is code
    assert "\n" not in str(refused.value)


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, data in files.items():
        file = folder / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "into 2 classes"),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
            "3 classes",
        ),
    ],
)
def test_an_encoder_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    folder = encoders.write_case("bert", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(Refused, match=told) as refused:
        inspect(folder)
    assert refused.value.failure.code is ErrorCode.UNSUPPORTED


def test_a_decoder_whose_tokens_see_those_behind_them_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.write_case("qwen2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(Refused, match="is_causal"):
        inspect(folder)
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": True}))
    assert inspect(folder).kind == "chat"


def test_what_a_model_was_made_for_and_how_much_it_reads(tmp_path: Path) -> None:
    found = {name: inspect(encoders.write_case(name, tmp_path / name)) for name in encoders.names()}
    assert found["bert"].kind == "embedding"
    assert found["bert_reranker"].kind == found["xlm_roberta_reranker"].kind == "reranker"
    assert (found["bert"].context, found["roberta"].context) == (128, 126)
    short = encoders.write_case("roberta", tmp_path / "short", sentence_bert_config={"max_seq_length": 60})
    assert inspect(short).context == 60


def test_old_names_of_norms_and_heads_of_pre_training_are_understood(tmp_path: Path) -> None:
    import safetensors.numpy

    folder = encoders.write_case("bert", tmp_path)
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    renamed = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in tensors.items()
    }
    extra = np.zeros((1, 128), np.int64)
    renamed |= {"bert.embeddings.position_ids": extra, "cls.predictions.bias": np.zeros(3, np.float32)}
    renamed["bert.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    safetensors.numpy.save_file(renamed, file)
    expected = encoders.reference("bert")
    model = load_encoder(inspect(folder)).model
    found = model(mx.array(expected["ids"]), mx.array(expected["types"]), expected["lengths"].tolist())
    assert np.abs(np.array(found)[0, 0] - expected["cls"][0]).max() < TOLERANCE


def test_a_tensor_too_many_and_one_too_few_are_refused(tmp_path: Path) -> None:
    import safetensors.numpy

    folder = encoders.write_case("bert", tmp_path)
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({**tensors, "encoder.layer.9.x": np.zeros(3, np.float32)}, file)
    with pytest.raises(Refused, match=r"encoder\.layer\.9\.x"):
        load_encoder(inspect(folder))
    del tensors["encoder.layer.1.output.dense.bias"]
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(Refused, match=r"encoder\.layer\.1\.output\.dense\.bias is missing"):
        load_encoder(inspect(folder))
