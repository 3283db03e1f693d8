"""The memory arithmetic of `mlxd fit`: the lines, the verdict, and that it counts as the worker does."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from parent.commands.fit import context_of
from parent.config import Settings
from parent.library import machine
from parent.library.catalog import ModelEntry, read_entry
from parent.library.fit import (
    CHUNK_CPU,
    CHUNK_GPU,
    Fit,
    Shape,
    bill,
    explain,
    kv_bytes_of,
    loaded_bytes,
    most_context,
    transient_bytes,
)
from parent.library.machine import Device
from parent.pool.estimate import room_of
from shared.control import LaunchModel
from shared.errors import Refused
from tests.parent.models import write_model


def a_fit(memory: int, context: int = 100, rows: int = 1, prefix: int = 0) -> Fit:
    return Fit(
        weights_bytes=1000,
        context=context,
        rows=rows,
        row_bytes=context * 10,
        kv_bytes_per_token=10,
        prefix_bytes=prefix,
        chunk=32,
        transient_bytes=500,
        memory_bytes=memory,
        usable_bytes=memory - memory // 10,
    )


def bill_of(settings: Settings, entry: ModelEntry, tokens: int, device: Device) -> Fit:
    return bill(
        entry,
        tokens,
        device,
        settings,
    )


CPU = machine.cpu(16 << 30)
CARD = machine.cuda(16 << 30)


def test_the_bill_is_the_sum_of_its_lines_and_the_verdict_follows() -> None:
    fit = a_fit(memory=3000)
    assert (fit.needed_bytes, fit.usable_bytes, fit.fits) == (2500, 2700, True)
    assert "fits, with 200 B to spare" in explain(fit)[-1]
    assert "100 tokens x 10 B a token" in explain(fit)[1]
    assert explain(a_fit(memory=2000))[-1].endswith("--context 30 would")
    assert "the weights alone leave no room" in explain(a_fit(memory=1000))[-1]


def test_all_rows_and_the_kept_prompts_are_on_the_bill_each_in_a_line_of_its_own() -> None:
    fit = a_fit(memory=20_000, rows=8, prefix=2000)
    assert (fit.kv_bytes, fit.needed_bytes) == (8000, 1000 + 8000 + 2000 + 500)
    lines = explain(fit)
    assert "8 rows x 100 tokens x 10 B a token" in lines[1]
    assert lines[2].split()[:4] == ["prefix", "cache", "2", "kB"]
    assert "32 prompt tokens at once" in lines[3]
    assert "fits" in lines[-1]


def test_what_does_not_fit_is_told_which_context_or_rows_would() -> None:
    fit = a_fit(memory=10_000, rows=8, prefix=2000)  # 9000 usable, 5500 for KV
    assert (fit.largest_context, fit.most_rows) == (68, 5)
    assert explain(fit)[-1].endswith("too much; --context 68 or --max-rows 5 would")
    assert a_fit(memory=10_000, rows=5, prefix=2000).fits
    assert a_fit(memory=10_000, rows=8, prefix=2000, context=68).fits
    assert "--prefix-cache-bytes" in explain(a_fit(memory=3000, prefix=5000))[-1]


@given(memory=st.integers(0, 10_000), context=st.integers(1, 1000))
def test_the_largest_context_is_the_last_that_fits(memory: int, context: int) -> None:
    largest = a_fit(memory, context).largest_context
    if largest:
        assert a_fit(memory, largest).fits
    assert not a_fit(memory, largest + 1).fits


def test_16_bit_tensors_double_where_floats_are_widened() -> None:
    dtypes = {"BF16": 10, "F16": 10, "F32": 100, "U32": 1000}
    assert loaded_bytes(dtypes, float32=True) == 1140
    assert loaded_bytes(dtypes, float32=False) == 1120


def test_one_step_grows_with_chunk_and_context_but_not_past_the_context() -> None:
    shape = Shape(hidden=64, intermediate=128, heads=4, vocab=100)
    assert transient_bytes(shape, 512, 1, rows=8) - transient_bytes(shape, 512, 1) == 4 * 7 * 100
    assert transient_bytes(shape, 512, 64, scores=False) == 4 * (64 * (4 * 64 + 3 * 128) + 100)
    assert transient_bytes(shape, 512, 1) == 4 * (4 * 64 + 3 * 128 + 4 * 512 + 100)
    assert transient_bytes(shape, 512, 64) > transient_bytes(shape, 512, 32)
    assert transient_bytes(shape, 16, 64) == transient_bytes(shape, 16, 16)


def test_the_bill_follows_the_device_and_the_settings(tmp_path: Path) -> None:
    entry = read_entry(write_model(tmp_path / "tiny"), "tiny")
    settings = Settings(data_dir=tmp_path)
    cpu = bill_of(settings, entry, 512, CPU)
    gpu = bill_of(settings, entry, 512, CARD)
    assert (cpu.chunk, gpu.chunk) == (CHUNK_CPU, CHUNK_GPU)
    assert (cpu.element_bytes, gpu.element_bytes) == (4, 2)
    assert cpu.weights_bytes == 2 * gpu.weights_bytes
    assert cpu.row_bytes == 2 * gpu.row_bytes == 512 * 2 * 2 * 2 * 16 * 4
    assert kv_bytes_of(entry, 512, True) == cpu.row_bytes
    assert (cpu.rows, cpu.prefix_bytes) == (settings.max_rows, settings.prefix_cache_bytes)
    assert (cpu.usable_bytes, gpu.usable_bytes) == (CPU.budget_bytes, CARD.budget_bytes)
    assert "of 17.2 GB of GPU memory, less a reserve" in explain(gpu)[-2]
    wide = Settings(data_dir=tmp_path, dtype="float32", prefill_chunk=64, max_rows=2, prefix_cache_bytes=0)
    asked = bill_of(wide, entry, 512, CARD)
    assert (asked.chunk, asked.rows, asked.prefix_bytes, asked.element_bytes) == (64, 2, 0, 4)
    assert asked.row_bytes == cpu.row_bytes


def test_the_bill_needs_no_disk(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", sliding_window=100, model_type="mistral")
    entry = read_entry(folder, "tiny")
    for file in folder.iterdir():
        file.unlink()
    capped = bill_of(Settings(data_dir=tmp_path), entry, 512, CARD)
    assert capped.row_bytes == 100 * capped.kv_bytes_per_token


def test_a_model_that_cannot_be_served_has_no_bill(tmp_path: Path) -> None:
    entry = read_entry(write_model(tmp_path / "odd", model_type="unheard"), "odd")
    with pytest.raises(Refused, match="odd: model family 'unheard'"):
        bill_of(Settings(data_dir=tmp_path), entry, 100, CPU)


def test_the_chunks_are_those_of_the_worker() -> None:
    from worker import load

    assert (CHUNK_CPU, CHUNK_GPU) == (load.CHUNK_CPU, load.CHUNK_GPU)


def test_the_context_is_the_one_asked_for_else_what_is_served(tmp_path: Path) -> None:
    entry = read_entry(write_model(tmp_path / "tiny"), "tiny")
    assert context_of(Settings(data_dir=tmp_path), entry, None) == 512
    assert context_of(Settings(data_dir=tmp_path, max_context=100), entry, None) == 100
    assert context_of(Settings(data_dir=tmp_path, max_context=9999), entry, None) == 512
    assert context_of(Settings(data_dir=tmp_path, max_context=100), entry, 200) == 200
    for tokens in (0, -1, 513):
        with pytest.raises(Refused, match=f"--context {tokens}"):
            context_of(Settings(data_dir=tmp_path), entry, tokens)
    silent = read_entry(write_model(tmp_path / "silent", max_position_embeddings=None), "silent")
    with pytest.raises(Refused, match="give --context"):
        context_of(Settings(data_dir=tmp_path), silent, None)


@given(memory=st.integers(0, 10_000), most=st.integers(0, 1000), step=st.integers(0, 3))
def test_the_most_context_is_the_last_that_fits_though_a_step_grows_with_it(
    memory: int, most: int, step: int
) -> None:
    def count(tokens: int) -> Fit:
        return replace(a_fit(memory, tokens), transient_bytes=500 + step * tokens)

    found = most_context(count, most)
    assert found == 0 or count(found).fits
    assert found == most or not count(found + 1).fits
    assert not most or found <= most


@pytest.mark.parametrize(
    ("spare", "adapters", "verdict"),
    [
        (0, 0, "fully"),
        (0, 1, "partly"),
        (7, 7, "fully"),
        (-1, 0, "partly"),
        (None, 0, "partly"),
        (None, 1, "no"),
    ],
)
def test_a_verdict_turns_at_the_byte(tmp_path: Path, spare: int | None, adapters: int, verdict: str) -> None:
    entry = read_entry(write_model(tmp_path / "tiny"), "tiny")
    launch = LaunchModel(model_id="tiny", path=str(entry.path), prefix_cache_bytes=1 << 20)
    whole = room_of(entry, launch, CPU)
    assert whole.total_bytes is not None
    assert whole.loads_with_bytes is not None
    budget = whole.loads_with_bytes if spare is None else whole.total_bytes + spare
    found = room_of(entry, launch, replace(CPU, budget_bytes=budget), adapters)
    assert (found.fits, found.usable_bytes) == (verdict, budget)
    assert found.total_bytes == whole.total_bytes + adapters
