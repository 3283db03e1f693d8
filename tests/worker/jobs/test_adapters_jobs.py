"""Adapters fused into weights, and merged with each other: the numbers, the bytes, and what is refused."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from shared.adapter import inspect_adapter
from shared.checkpoint import inspect
from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobStage
from shared.lab import Fuse, MergeAdapters
from tests.adapters import ALL, QV, random_pairs, same, write_mlx, write_peft
from tests.oracles.checkpoints import reference, write_case
from tests.worker.models.running import dequantized, logits_of
from worker.adapters.mount import Adapters
from worker.jobs import fuse, merge_adapters
from worker.jobs.context import JobContext
from worker.models import load_model

PROMPT = reference("llama_tied")["input_ids"]
Q8 = {"group_size": 32, "bits": 8, "mode": "affine"}
Q4 = {
    "group_size": 32,
    "bits": 4,
    "mode": "affine",
    "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
}


def context(output: Path, events: list[JobEvent] | None = None, stop: bool = False) -> JobContext:
    return JobContext((events if events is not None else []).append, lambda: stop, output)


def with_adapters(model: Path, *folders: Path) -> np.ndarray:
    loaded = load_model(model)
    held = Adapters(loaded.linears, loaded.parts, loaded.dtype, "m")
    for folder in folders:
        held.mount(folder.name, str(folder))
    held.selection.choose([(tuple(folder.name for folder in folders), 1)])
    return logits_of(loaded.model, PROMPT, [1 << 30])


def logits(model: Path) -> np.ndarray:
    return logits_of(load_model(model).model, PROMPT, [1 << 30])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_case("llama_tied", tmp_path / "model")


def test_a_fused_model_has_the_logits_of_its_adapters(plain: Path, tmp_path: Path) -> None:
    a = write_mlx(tmp_path / "a", random_pairs(plain, ALL, seed=1))
    b = write_peft(tmp_path / "b", random_pairs(plain, QV, seed=2), alpha=2)
    events: list[JobEvent] = []
    done = fuse.run(
        Fuse(model=str(plain), adapters=[str(a), str(b)]), context(tmp_path / "out" / "x", events)
    )
    out = Path(done.output)
    assert same(logits(out), with_adapters(plain, a, b)) <= 1e-5
    stages = [event for event in events if isinstance(event, JobStage)]
    assert stages[-1].done == stages[-1].total > 0
    assert inspect(out).weights_bytes == inspect(plain).weights_bytes
    assert json.loads((out / "mlxd.json").read_text())["origin"] == "model + a + b"
    assert [each.name for each in out.parent.iterdir()] == ["x"]


def test_a_dora_adapter_is_fused_with_its_magnitudes_and_alone(plain: Path, tmp_path: Path) -> None:
    pairs = random_pairs(plain, QV)
    magnitudes = {name: np.linspace(0.5, 1.5, b.shape[1], dtype=np.float32) for name, (_, b) in pairs.items()}
    d = write_mlx(tmp_path / "d", pairs, magnitudes=magnitudes)
    out = Path(fuse.run(Fuse(model=str(plain), adapters=[str(d)]), context(tmp_path / "out")).output)
    assert same(logits(out), with_adapters(plain, d)) <= 2e-5
    with pytest.raises(Refused, match="DoRA"):
        fuse.run(Fuse(model=str(plain), adapters=[str(d), str(d)]), context(tmp_path / "other"))


@pytest.mark.parametrize("shards", [1, 3])
def test_what_no_adapter_changes_is_copied_byte_by_byte(shards: int, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model", quantize=Q4, shards=shards)
    source = dequantized(write_case("llama_tied", tmp_path / "whole", quantize=Q4), tmp_path / "plain")
    pairs = random_pairs(source, ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"))
    a = write_mlx(tmp_path / "a", pairs)
    out = Path(fuse.run(Fuse(model=str(model), adapters=[str(a)]), context(tmp_path / "out")).output)

    def tensors(folder: Path) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for file in folder.glob("*.safetensors"):
            found |= safetensors.numpy.load_file(file)
        return found

    before, after = tensors(model), tensors(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert {name.rpartition(".")[0] for name in changed} == set(pairs)
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert sorted(file.name for file in model.iterdir()) == sorted(
        file.name for file in out.iterdir() if file.name != "mlxd.json"
    )
    for module in pairs:  # quantized again by the same recipe
        how = {**Q4, **(Q4.get(module) or {})}
        weight = mx.array(safetensors.numpy.load_file(source / "model.safetensors")[f"{module}.weight"])
        low = 0.5 * (mx.array(pairs[module][0]) @ mx.array(pairs[module][1])).T
        expected = mx.quantize(weight + low, group_size=how["group_size"], bits=how["bits"])
        for leaf, part in zip(("weight", "scales", "biases"), expected, strict=True):
            assert np.mean(np.array(part) != after[f"{module}.{leaf}"]) < 0.01


def test_a_fused_adapter_may_leave_the_weights_multiplied_out(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model", quantize=Q8)
    source = dequantized(model, tmp_path / "plain")
    a = write_mlx(tmp_path / "a", random_pairs(source, ALL))
    spec = Fuse(model=str(model), adapters=[str(a)], dequantize=True)
    out = Path(fuse.run(spec, context(tmp_path / "out")).output)
    assert inspect(out).quantization == ""
    assert same(logits(out), with_adapters(source, a)) <= 1e-5


def test_a_fuse_of_an_adapter_that_does_not_fit_writes_nothing(plain: Path, tmp_path: Path) -> None:
    other = write_case("qwen3", tmp_path / "qwen3")
    a = write_mlx(tmp_path / "a", {"model.layers.7.mlp.up_proj": random_pairs(other).popitem()[1]})
    with pytest.raises(Refused, match=r"layers\.7\.mlp\.up_proj") as refused:
        fuse.run(Fuse(model=str(plain), adapters=[str(a)]), context(tmp_path / "out" / "x"))
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
    wrong = {name: (a[:5], b) for name, (a, b) in random_pairs(plain).items()}
    b = write_mlx(tmp_path / "b", wrong)
    with pytest.raises(Refused, match="in the model"):
        fuse.run(Fuse(model=str(plain), adapters=[str(b)]), context(tmp_path / "out" / "x"))
    good = write_mlx(tmp_path / "c", random_pairs(plain))
    with pytest.raises(Refused, match="stopped"):
        fuse.run(Fuse(model=str(plain), adapters=[str(good)]), context(tmp_path / "out" / "x", stop=True))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    (tmp_path / "there").mkdir()
    with pytest.raises(Refused, match="exists"):
        fuse.run(Fuse(model=str(plain), adapters=[str(good)]), context(tmp_path / "there"))


def test_a_merged_adapter_is_the_sum_of_its_parts(plain: Path, tmp_path: Path) -> None:
    a = write_mlx(tmp_path / "a", random_pairs(plain, ALL, rank=3, seed=1), scale=0.7, base_model="m")
    b = write_peft(
        tmp_path / "b", random_pairs(plain, QV, rank=5, seed=2), alpha=2, base_model_name_or_path="m"
    )
    spec = MergeAdapters(adapters=[str(a), str(b)])
    out = Path(merge_adapters.run(spec, context(tmp_path / "adapters" / "m")).output)
    made = inspect_adapter(out)
    assert (made.rank, made.scale, made.layout, made.base_models) == (8, 1.0, "mlx", ["m"])
    assert same(with_adapters(plain, out), with_adapters(plain, a, b)) <= 1e-5
    twice = MergeAdapters(adapters=[str(a), str(b)], factors=[2.0, 0.0])
    out = Path(merge_adapters.run(twice, context(tmp_path / "adapters" / "t")).output)
    double = write_mlx(tmp_path / "d", random_pairs(plain, ALL, rank=3, seed=1), scale=1.4)
    assert same(with_adapters(plain, out), with_adapters(plain, double)) <= 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"base_model": "another"}, "made for"),
        ({"magnitudes": True}, "DoRA"),
        ({"narrow": True}, "in one before"),
    ],
)
def test_adapters_that_do_not_go_together_are_not_merged(
    config: dict[str, object], said: str, plain: Path, tmp_path: Path
) -> None:
    pairs = random_pairs(plain)
    a = write_mlx(tmp_path / "a", pairs, base_model="one")
    if config.pop("magnitudes", False):
        magnitudes = {name: np.ones(b.shape[1], np.float32) for name, (_, b) in pairs.items()}
        b = write_mlx(tmp_path / "b", pairs, magnitudes=magnitudes)
    elif config.pop("narrow", False):
        b = write_mlx(tmp_path / "b", {name: (a[:4], b) for name, (a, b) in pairs.items()})
    else:
        b = write_mlx(tmp_path / "b", pairs, **config)
    with pytest.raises(Refused, match=said):
        merge_adapters.run(MergeAdapters(adapters=[str(a), str(b)]), context(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_merge_of_adapters_wants_a_factor_each_and_a_new_name(plain: Path, tmp_path: Path) -> None:
    a = str(write_mlx(tmp_path / "a", random_pairs(plain)))
    with pytest.raises(Refused, match="1 factors for 2"):
        merge_adapters.run(MergeAdapters(adapters=[a, a], factors=[1.0]), context(tmp_path / "out"))
    with pytest.raises(Refused, match="exists"):
        merge_adapters.run(MergeAdapters(adapters=[a, a]), context(tmp_path))
