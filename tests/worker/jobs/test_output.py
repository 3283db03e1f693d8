"""What a job leaves behind: safetensors files that the library reads, folders that appear whole or not."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from shared.checkpoint import INDEX
from shared.errors import ErrorCode, Refused
from worker.jobs.context import make_scratch, publish, require_space
from worker.jobs.safetensors_writer import Buffer, Planned, write

NAMES = {"F32": np.float32, "F16": np.float16, "U32": np.uint32, "U8": np.uint8}


def planned(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Planned, np.ndarray]:
    values = np.random.RandomState(seed).randint(0, 100, shape).astype(NAMES[dtype])

    def pieces() -> Iterator[Buffer]:
        for row in values if values.ndim > 1 else [values]:
            yield row.data.cast("B")

    return Planned(name, dtype, shape, pieces), values


def some() -> list[tuple[Planned, np.ndarray]]:
    return [
        planned("odd", "U8", (3,), 1),
        planned("half", "F16", (5, 3), 2),
        planned("wide", "F32", (4, 7), 3),
        planned("packed", "U32", (2, 2), 4),
    ]


def test_one_file_is_what_the_library_reads(tmp_path: Path) -> None:
    told: list[str] = []
    write(
        tmp_path,
        [one for one, _ in some()],
        on_tensor=lambda one: told.append(one.name),
        metadata={"format": "pt"},
    )
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert found.keys() == {one.name for one, _ in some()} == set(told)
    for one, values in some():
        assert np.array_equal(found[one.name], values)
        assert found[one.name].dtype == values.dtype


@pytest.mark.parametrize(("limit", "files"), [(10**6, 0), (128, 2), (1, 4)])
def test_a_large_model_becomes_shards_with_an_index(limit: int, files: int, tmp_path: Path) -> None:
    write(
        tmp_path,
        [one for one, _ in some()],
        on_tensor=lambda one: None,
        metadata={},
        max_shard_bytes=limit,
    )
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) == files
    if files:
        index = json.loads((tmp_path / INDEX).read_text())
        assert set(index["weight_map"].values()) == {file.name for file in shards}
        for one, values in some():
            file = tmp_path / index["weight_map"][one.name]
            assert np.array_equal(safetensors.numpy.load_file(file)[one.name], values)


def test_pieces_that_do_not_add_up_are_an_error(tmp_path: Path) -> None:
    short = Planned("short", "F32", (4,), lambda: iter([b"12345678"]))
    with pytest.raises(ValueError, match="short: 8 bytes instead of 16"):
        write(tmp_path, [short], on_tensor=lambda one: None, metadata={})


def test_too_little_room_is_said_in_numbers(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="TB are needed") as caught:
        require_space(tmp_path, 10**18)
    assert caught.value.failure.code is ErrorCode.CANNOT_FIT
    require_space(tmp_path, 1)


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "model"
    for text in ("first", "second"):
        scratch = make_scratch(output)
        (scratch / "file").write_text(text)
        assert not output.exists() or (output / "file").read_text() == "first"
        publish(scratch, output)
        assert (output / "file").read_text() == text
    assert [one.name for one in output.parent.iterdir()] == ["model"]


def test_scratch_folders_are_hidden_and_beside_the_output(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path / "model")
    assert scratch.parent == tmp_path
    assert scratch.name.startswith(".")
    (scratch / "left").write_text("x")
    again = make_scratch(tmp_path / "model")  # of this very process: an earlier try that failed
    assert list(again.iterdir()) == []
