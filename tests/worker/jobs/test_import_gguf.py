"""GGUF import end to end: tiny files of our own writer become directories that mean exactly the same."""

import hashlib
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shared.checkpoint import inspect
from shared.control import LaunchJob
from shared.errors import ErrorCode, Refused
from shared.jobs import ImportGguf, JobDone, JobEvent, JobStage, JobStarted, NoopJob
from tests.oracles import checkpoints
from tests.worker.jobs.gguf_files import Raw, blocks, case_tensors, floats, write
from worker import jobs
from worker.layers.batch import solo
from worker.models import load_model

CASE = "llama_tied"


def convert(source: Path, output: Path, **spec: Any) -> tuple[JobDone, list[JobEvent]]:
    events: list[JobEvent] = []
    launch = LaunchJob(
        job_id="1", spec=ImportGguf(source=str(source), name="tiny", **spec), output=str(output)
    )
    return jobs.run(launch, events.append, lambda: False), events


def tensors_in(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        found.update(loaded)
    return found


def logits_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    model = load_model(folder).model
    return np.array(model.head(model(solo(mx.array(ids), model.make_caches(len(ids))))))


@pytest.mark.parametrize("name", ["llama_tied", "llama_biases", "llama_head_dim"])
def test_oracle_an_imported_model_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    metadata, tensors, expected = case_tensors(name)
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out", dtype="float32")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(np.array(found[key]), value) for key, value in expected.items())
    reference = checkpoints.reference(name)
    assert np.abs(logits_of(tmp_path / "out", reference["input_ids"]) - reference["logits"]).max() < 1e-4


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_tensor_type_is_dequantized_exactly(kind: str, tmp_path: Path) -> None:
    metadata, tensors, expected = case_tensors(CASE, kind)
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out", dtype="float32")
    found = tensors_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(np.array(found[key]), value), key


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_kept_quantization_means_exactly_the_same(kind: str, bits: int, tmp_path: Path) -> None:
    metadata, tensors, expected = case_tensors(CASE, kind)
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out", dtype="keep")
    found = tensors_in(tmp_path / "out")
    for key, value in expected.items():
        module = key.removesuffix(".weight")
        if value.ndim == 1:
            assert np.array_equal(np.array(found[key]), value.astype(np.float16)), key
            continue
        parts = [found[f"{module}.{leaf}"] for leaf in ("weight", "scales", "biases")]
        assert (parts[1].dtype, parts[2].dtype) == (mx.float16, mx.float16)
        exact = [parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32)]
        plain = mx.dequantize(*exact, group_size=32, bits=bits)
        assert np.array_equal(np.array(plain), value), key
    checkpoint = inspect(tmp_path / "out")
    assert checkpoint.quantization == f"affine {bits}-bit group 32"
    assert load_model(tmp_path / "out").quantization == checkpoint.quantization


def test_tensors_of_several_types_get_entries_of_their_own(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE, "Q4_1")
    tensors["token_embd.weight"] = blocks("Q8_0", (checkpoints.VOCAB_SIZE, 64), 9)
    tensors["blk.1.ffn_up.weight"] = floats("F16", np.ones((128, 64), np.float32))
    for name, raw in tensors.items():  # norms become float16 beside float16 scales: take values it has
        if len(raw.shape) == 1:
            tensors[name] = floats("F32", raw.values.astype(np.float16).astype(np.float32))
    source = write(tmp_path / "m.gguf", metadata, tensors)
    convert(source, tmp_path / "kept", dtype="keep")
    convert(source, tmp_path / "plain", dtype="float32")
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
        "model.layers.1.mlp.up_proj": False,
    }
    ids = checkpoints.reference(CASE)["input_ids"]
    assert np.abs(logits_of(tmp_path / "kept", ids) - logits_of(tmp_path / "plain", ids)).max() < 1e-3


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_keep_of_a_plain_file_keeps_its_float_type(kind: str, dtype: str, tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE, kind)
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out", dtype="keep")
    assert {each.dtype for each in tensors_in(tmp_path / "out").values()} == {getattr(mx, dtype)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_auto_is_float32_on_cpu(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE, "Q4_1")
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert inspect(tmp_path / "out").quantization == ("" if on_cpu else "affine 4-bit group 32")


def test_the_directory_says_where_it_came_from_and_reads_like_any_other(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    metadata["tokenizer.ggml.eot_token_id"] = 0
    source = write(tmp_path / "m.gguf", metadata, tensors)
    done, events = convert(source, tmp_path / "out", dtype="float16", origin="here", aliases=["starter"])
    card = json.loads((tmp_path / "out" / "mlxd.json").read_text())
    assert (card["name"], card["aliases"], card["origin"], card["dtype"]) == (
        "tiny",
        ["starter"],
        "here",
        "float16",
    )
    assert card["source_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert done.output == str(tmp_path / "out")
    assert "float16" in done.summary
    config, _ = checkpoints.case(CASE)
    found = inspect(tmp_path / "out")
    same = ("hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_parameters")
    assert {key: found.config[key] for key in same} == {key: config[key] for key in same}
    assert found.eos_ids == [0, 2]
    assert isinstance(events[0], JobStarted)
    stages = [event for event in events if isinstance(event, JobStage) and event.stage == "convert"]
    assert [stage.done for stage in stages] == sorted(stage.done for stage in stages)
    assert stages[-1].done == stages[-1].total > 0
    assert {stage.message for stage in stages} > {"model.norm.weight", "model.embed_tokens.weight"}


def set_meta(**changes: Any) -> Callable[[dict[str, Any], dict[str, Raw]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Raw]) -> None:
        for key, value in changes.items():
            name = key.replace("__", ".")
            metadata.pop(name, None)
            if value is not ...:
                metadata[name] = value

    return change


def set_tensor(name: str, raw: Raw) -> Callable[[dict[str, Any], dict[str, Raw]], None]:
    return lambda metadata, tensors: tensors.update({name: raw})


IQ2_XS = Raw("IQ2_XS", (2, 256), b"\0" * 148, np.zeros((2, 256), np.float32))
ONE = floats("F32", np.ones(4, np.float32))

REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Raw]], None], ErrorCode, str]] = {
    "other architecture": (
        set_meta(general__architecture="rwkv7"),
        ErrorCode.UNSUPPORTED,
        "architecture 'rwkv7' cannot be converted; llama, mistral3",
    ),
    "no architecture": (set_meta(general__architecture=...), ErrorCode.UNSUPPORTED, "architecture None"),
    "tensor type": (
        set_tensor("blk.0.ffn_up.weight", IQ2_XS),
        ErrorCode.UNSUPPORTED,
        "blk.0.ffn_up.weight is of type IQ2_XS, which cannot be converted; accepted are F32",
    ),
    "foreign tensor": (
        set_tensor("blk.0.strange.weight", ONE),
        ErrorCode.UNSUPPORTED,
        "blk.0.strange.weight",
    ),
    "experts": (set_meta(llama__expert_count=8), ErrorCode.UNSUPPORTED, "llama.expert_count = 8"),
    "layers that differ": (
        set_meta(llama__attention__head_count_kv=[2, 1, 2]),
        ErrorCode.UNSUPPORTED,
        "differs from layer to layer",
    ),
    "part of a head rotated": (
        set_meta(llama__rope__dimension_count=8),
        ErrorCode.UNSUPPORTED,
        "rotated parts of a head differ",
    ),
    "rope scaling": (
        set_meta(llama__rope__scaling__type="spiral"),
        ErrorCode.UNSUPPORTED,
        "rope scaling 'spiral'",
    ),
    "tokenizer": (set_meta(tokenizer__ggml__model="bert"), ErrorCode.UNSUPPORTED, "tokenizer 'bert'"),
    "pre-tokenizer": (
        set_meta(tokenizer__ggml__pre="viking"),
        ErrorCode.UNSUPPORTED,
        "pre-tokenizer 'viking' cannot be converted; known are smollm",
    ),
    "no layer count": (
        set_meta(llama__block_count=...),
        ErrorCode.BAD_CHECKPOINT,
        "llama.block_count is missing",
    ),
    "layer count a word": (
        set_meta(llama__block_count="x"),
        ErrorCode.BAD_CHECKPOINT,
        "llama.block_count is 'x'",
    ),
    "no tokens": (set_meta(tokenizer__ggml__tokens=...), ErrorCode.BAD_CHECKPOINT, "tokenizer.ggml.tokens"),
    "a token twice": (
        set_meta(tokenizer__ggml__tokens=["a", "a"], tokenizer__ggml__token_type=[1, 1]),
        ErrorCode.BAD_CHECKPOINT,
        "twice",
    ),
    "merges that do not fit": (
        set_meta(tokenizer__ggml__merges=["nope nope"]),
        ErrorCode.BAD_CHECKPOINT,
        "merge rules do not fit",
    ),
    "no embedding": (
        lambda metadata, tensors: tensors.pop("token_embd.weight") and None,
        ErrorCode.BAD_CHECKPOINT,
        "token_embd.weight",
    ),
    "more heads than anybody has": (
        set_meta(llama__attention__head_count=2**31 - 1),
        ErrorCode.BAD_CHECKPOINT,
        "which are not heads of",
    ),
    "layers that are not there": (
        set_meta(llama__block_count=2**31 - 1),
        ErrorCode.BAD_CHECKPOINT,
        "it says that it has 2147483647 layers, and has no tensor blk.2147483646.*",
    ),
    "heads that do not fit": (
        set_meta(llama__attention__head_count_kv=4),
        ErrorCode.BAD_CHECKPOINT,
        "attn_k.weight has 32 rows, which are not heads of 16 values",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name_and_leaves_nothing(fault: str, tmp_path: Path) -> None:
    change, code, message = REFUSED[fault]
    metadata, tensors, _ = case_tensors(CASE)
    change(metadata, tensors)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(Refused) as caught:
        convert(source, tmp_path / "models" / "out", dtype="float32")
    assert message in str(caught.value)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.failure.code is code
    assert list(tmp_path.glob("models/*")) == []


@pytest.mark.parametrize(
    ("keep", "message"), [(0, "the file is empty"), (500, "truncated"), (-4, "truncated")]
)
def test_a_file_cut_short_is_refused(keep: int, message: str, tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(Refused, match=message) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT


def test_a_missing_file_and_an_unknown_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"absent\.gguf: No such file"):
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    with pytest.raises(Refused, match="float33"):
        convert(tmp_path / "absent.gguf", tmp_path / "out", dtype="float33")


def test_a_disk_that_fills_up_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the nearest to a full disk without root
    try:
        with pytest.raises(Refused, match=r"m\.gguf was not imported") as caught:
            convert(source, tmp_path / "models" / "out", dtype="float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.failure.code is ErrorCode.CANNOT_FIT
    assert list(tmp_path.glob("models/*")) == []


def test_values_too_large_for_float16_are_refused_not_made_infinite(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    tensors["output_norm.weight"] = floats("F32", np.full(64, 1e6, np.float32))
    source = write(tmp_path / "m.gguf", metadata, tensors)
    with pytest.raises(Refused, match=r"model\.norm\.weight.*float16"):
        convert(source, tmp_path / "out", dtype="float16")
    convert(source, tmp_path / "out", dtype="bfloat16")


def test_an_existing_output_is_replaced_and_stays_when_the_import_fails(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    output = tmp_path / "models" / "out"
    output.mkdir(parents=True)
    (output / "old").write_text("old")
    broken = write(tmp_path / "broken.gguf", {**metadata, "tokenizer.ggml.pre": "viking"}, tensors)
    with pytest.raises(Refused):
        convert(broken, output)
    assert [file.name for file in output.iterdir()] == ["old"]
    convert(source, output)
    assert not (output / "old").exists()
    assert inspect(output).model_type == "llama"
    assert [folder.name for folder in output.parent.iterdir()] == ["out"]


def test_a_stopped_import_leaves_nothing(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    spec = ImportGguf(source=str(source), name="tiny", dtype="float32")
    seen: list[JobEvent] = []
    with pytest.raises(Refused, match="stopped"):
        jobs.run(
            LaunchJob(job_id="1", spec=spec, output=str(tmp_path / "models" / "out")),
            seen.append,
            lambda: any(isinstance(event, JobStage) and event.stage == "convert" for event in seen),
        )
    assert list((tmp_path / "models").iterdir()) == []


def test_scratch_of_a_dead_import_is_cleared_away(tmp_path: Path) -> None:
    metadata, tensors, _ = case_tensors(CASE)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    dead = tmp_path / ".out.part-999999999"  # above the largest pid
    dead.mkdir()
    convert(source, tmp_path / "out")
    assert not dead.exists()


def test_the_noop_job_counts() -> None:
    events: list[JobEvent] = []
    done = jobs.run(LaunchJob(job_id="1", spec=NoopJob(steps=2)), events.append, lambda: False)
    assert events == [JobStarted(), JobStage("counting", 1, 2), JobStage("counting", 2, 2)]
    assert done.summary == "2 steps"
    with pytest.raises(Refused, match="stopped"):
        jobs.run(LaunchJob(job_id="1", spec=NoopJob()), events.append, lambda: True)
