"""Model directories: what `inspect` says of good ones, and the one line it refuses bad ones with."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.checkpoint import INDEX, inspect, kv_bytes, kv_bytes_per_token, tensors_of
from shared.errors import ErrorCode, Refused
from shared.tensor_headers import read_header
from tests.oracles.checkpoints import case, write_case
from tests.oracles.weights import shapes


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` removes one."""
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def file_of(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_a_good_directory_is_described(tmp_path: Path) -> None:
    found = inspect(write_case("llama_tied", tmp_path, shards=2))
    config, _ = case("llama_tied")
    expected = shapes(config)
    assert found.model_type == "llama"
    assert found.architectures == ["LlamaForCausalLM"]
    assert [shard.file for shard in found.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert found.dtypes == {"F32": found.weights_bytes}
    assert (found.context, found.eos_ids, found.modalities, found.warnings) == (512, [2], ["text"], [])
    assert {name: tuple(tensor.shape) for name, tensor in tensors_of(found).items()} == expected
    assert found.weights_bytes == sum(tensor.num_bytes for tensor in tensors_of(found).values())


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (None, ""),
        ({"bits": 4, "group_size": 32, "mode": "affine"}, "affine 4-bit group 32"),
        ({"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 64}}, "affine 4/8-bit group 64"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4", "lm_head": False}, "mxfp4 4-bit group 32"),
    ],
)
def test_quantization_is_named(scheme: dict[str, Any] | None, label: str, tmp_path: Path) -> None:
    assert inspect(write_case("llama_biases", tmp_path, quantize=scheme)).quantization == label


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, 2, [2]), ([2, 7], 9, [2, 7, 9]), (None, [5], [5]), (3, None, [3]), (None, None, [])],
)
def test_end_tokens_are_those_of_config_and_generation_config(
    config: Any, generation: Any, expected: list[int], tmp_path: Path
) -> None:
    write_case("llama_tied", tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert inspect(tmp_path).eos_ids == expected


def test_a_nested_text_config_is_flattened(tmp_path: Path) -> None:
    write_case("llama_tied", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "some_vision", "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = inspect(tmp_path)
    assert (found.model_type, found.config["text_model_type"]) == ("some_vision", "llama")
    assert found.config["hidden_size"] == 64
    assert found.modalities == ["text", "image"]


def test_a_stale_index_beside_a_complete_file_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    write_case("llama_tied", tmp_path)
    weight_map = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "x": "model-00002-of-00002.safetensors",
    }
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = inspect(tmp_path)
    assert [shard.file for shard in found.shards] == ["model.safetensors"]
    assert "model-00001-of-00002.safetensors" in found.warnings[0]


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, keep: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:keep])

    return change


def put(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def set_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


SHARD_2 = "model-00002-of-00002.safetensors"
DEEP = b"[" * 9000 + b"]" * 9000
F32_4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}

FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (drop("config.json"), "no config.json"),
    "config not JSON": (put("config.json", b"{"), "config.json: not JSON"),
    "config without end": (
        put("config.json", b'{"x": ' + DEEP + b"}"),
        "not JSON (objects and lists stand",
    ),
    "config a list": (put("config.json", b"[]"), "config.json: not a JSON object"),
    "no model_type": (set_config(model_type=...), "config.json: no model_type"),
    "model_type a number": (set_config(model_type=7), "config.json: no model_type"),
    "end token a word": (set_config(eos_token_id="end"), "eos_token_id is 'end'"),
    "no tokenizer": (drop("tokenizer.json"), "no tokenizer.json"),
    "missing shard": (drop(SHARD_2), f"{SHARD_2} is missing"),
    "truncated shard": (cut(SHARD_2, -10), f"{SHARD_2}: truncated, expected "),
    "empty shard": (cut(SHARD_2, 0), f"{SHARD_2}: the file has 0 bytes"),
    "cut in the header": (cut(SHARD_2, 100), f"{SHARD_2}: truncated"),
    "not safetensors": (put(SHARD_2, b"<html>not found</html>"), f"{SHARD_2}: the file announces a header"),
    "header not JSON": (put(SHARD_2, file_of(b"{nope}")), "a header that is not JSON"),
    "header without end": (
        put(SHARD_2, file_of(b'{"x": ' + DEEP + b"}")),
        "not JSON (objects and lists stand",
    ),
    "header a list": (put(SHARD_2, file_of(b"[]")), "not a JSON object"),
    "no shape": (put(SHARD_2, file_of({"a": {"dtype": "F32"}})), "describes tensor a wrongly"),
    "unknown dtype": (put(SHARD_2, file_of({"a": {**F32_4, "dtype": "F3"}}, b"0" * 16)), "of dtype F3"),
    "negative shape": (put(SHARD_2, file_of({"a": {**F32_4, "shape": [-4]}}, b"0" * 16)), "the shape [-4]"),
    "offsets and shape": (
        put(SHARD_2, file_of({"a": {**F32_4, "shape": [5]}}, b"0" * 16)),
        "bytes 0 to 16, but F32 [5] takes 20",
    ),
    "overlap": (
        put(SHARD_2, file_of({"a": F32_4, "b": {**F32_4, "data_offsets": [8, 24]}}, b"0" * 24)),
        "tensors a and b overlap",
    ),
    "index not JSON": (put(INDEX, b"nope"), f"{INDEX}: not JSON"),
    "index without map": (put(INDEX, b"{}"), f"{INDEX}: no weight_map"),
    "index leads outside": (put(INDEX, b'{"weight_map": {"a": "../x.safetensors"}}'), "'../x.safetensors'"),
    "index names a tensor that is not there": (
        lambda folder: edit_json(
            folder / INDEX,
            weight_map={**json.loads((folder / INDEX).read_text())["weight_map"], "ghost": SHARD_2},
        ),
        "tensor ghost is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_directory_is_refused_in_one_line_that_names_the_fault(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    change(write_case("llama_tied", tmp_path, shards=2))
    with pytest.raises(Refused) as caught:
        inspect(tmp_path)
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("x.gguf", "mlxd import"),
        ("pytorch_model.bin", "safetensors version"),
        ("adapter.safetensors", "model*.safetensors"),
        ("readme.md", "no weights"),
    ],
)
def test_a_directory_without_weights_says_what_to_do_about_what_is_there(
    name: str, hint: str, tmp_path: Path
) -> None:
    write_case("llama_tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Refused, match=hint.replace("*", r"\*")):
        inspect(tmp_path)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such directory"):
        inspect(tmp_path / "absent")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(Refused, match=r"mlxd import model\.gguf"):
        inspect(tmp_path / "model.gguf")


def test_weights_of_another_quantizer_are_unsupported(tmp_path: Path) -> None:
    write_case("llama_tied", tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(Refused, match="gptq") as caught:
        inspect(tmp_path)
    assert caught.value.failure.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("llama_tied", 1, 3 * 2 * 2 * 16 * 4),
        ("llama_tied", 100, 3 * 2 * 2 * 16 * 4 * 100),
        ("llama_head_dim", 10, 2 * 2 * 1 * 32 * 4 * 10),
        ("mistral_window", 12, 2 * 2 * 2 * 16 * 4 * 12),
        ("mistral_window", 500, 2 * 2 * 2 * 16 * 4 * 12),
    ],
)
def test_kv_bytes_follow_heads_and_stop_at_the_window(
    name: str, tokens: int, expected: int, tmp_path: Path
) -> None:
    found = inspect(write_case(name, tmp_path))
    assert kv_bytes(found, tokens, 4) == expected
    assert kv_bytes_per_token(found, 4) == kv_bytes(found, 1, 4)


@given(data=st.binary(max_size=300), length=st.integers(0, 400))
def test_any_bytes_as_a_weight_file_are_read_or_refused(
    data: bytes, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + data)
    with contextlib.suppress(Refused):
        read_header(path)  # anything else raised fails the test


@given(
    header=st.dictionaries(
        st.text(max_size=5),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "U8", "Q"]),
                "shape": st.lists(st.integers(-1, 4), max_size=3),
                "data_offsets": st.tuples(st.integers(-4, 40), st.integers(-4, 40)),
            }
        ),
        max_size=3,
    ),
    size=st.integers(0, 50),
)
def test_what_a_header_is_accepted_for_lies_inside_the_file(
    header: dict[str, Any], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    path.write_bytes(file_of(header, b"x" * size))
    try:
        tensors = read_header(path)
    except Refused:
        return
    spans = [header[name]["data_offsets"] for name in tensors]
    assert all(0 <= begin <= end <= size for begin, end in spans)
    assert sum(tensor.num_bytes for tensor in tensors.values()) <= size
