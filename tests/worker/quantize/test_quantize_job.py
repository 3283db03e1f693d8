"""The job as a whole: what it makes and tells, what is in memory meanwhile, how it goes on, and what it refuses."""

import errno
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from parent.library.catalog import read_entry
from shared.checkpoint import inspect
from shared.control import LaunchJob
from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobLog, JobSaved, JobStage
from shared.lab import Quantize
from tests.oracles.checkpoints import case, write_case, write_model
from tests.worker.quantize.lab import UNIFORM, contents, run_job, tensors_of
from worker import jobs
from worker.measure.compare import measure

MIXED: dict[str, Any] = {
    "group_size": 32,
    "target_bpw": 6.5,
    "candidate_bits": [3, 4, 8],
    "num_calibration": 1,
    "calibration_tokens": 16,
}
SMALL = 40_000
"""Bytes of a shard, so that there are several."""


def big(folder: Path, layers: int = 12) -> Path:
    """A model of many shards, each with a layer or so."""
    config, seed = case("llama_tied")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": layers}
    return write_model({**config, **sizes, "head_dim": 64}, seed, folder, shards=8)


def test_a_model_comes_out_whole_with_its_card_and_the_library_shows_it(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    (model / "LICENSE").write_text("free")
    (model / "model.onnx").write_text("of others")
    (model / "README.md").write_text("of the source")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    spec = Quantize(model=str(model), model_id="org/tiny", bits=4, group_size=32)
    done, events = run_job(spec, tmp_path / "models" / "tiny-4bit", work=tmp_path / "j1")
    out = Path(done.output)
    files = set(contents(out))
    assert files == {
        *("LICENSE", "README.md", "1_Pooling/config.json", "chat_template.jinja", "config.json"),
        *(
            "generation_config.json",
            "mlxd.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    }
    entry = read_entry(out, "tiny-4bit")
    assert not entry.error
    assert (entry.quantization, entry.origin) == ("affine 4-bit group 32", "org/tiny, quantized")
    card = (out / "README.md").read_text()
    held = measure(out, [[10, 20, 30]], model, lambda done, total: None)  # it can be run by itself
    assert held.divergence is not None
    for wanted in (
        "base_model: org/tiny",
        "affine, 4 bits in groups of 32",
        "KL to the source",
        "perplexity",
    ):
        assert wanted in card
    size = inspect(out).weights_bytes
    params = sum(tensor.size for tensor in tensors_of(model).values())
    assert f"| bits a weight | {size * 8 / params:.3f} |" in card
    assert done.summary.startswith(f"{size * 8 / params:.3f} bits a weight, KL 0.")
    stages = [event for event in events if isinstance(event, JobStage)]
    assert list(dict.fromkeys(event.stage for event in stages)) == ["inspect", "quantize", "measure"]
    assert all(event.done == event.total for event in stages if event is stages[-1])
    assert [event.step for event in events if isinstance(event, JobSaved)] == [1]
    assert any(isinstance(event, JobLog) and event.line.startswith("perplexity: ") for event in events)
    assert [path.name for path in out.parent.iterdir()] == ["tiny-4bit"]


def test_quantize_runs_as_a_job_of_the_worker(tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("qwen3", tmp_path / "model")), **UNIFORM)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Quantize) == spec
    launch = LaunchJob(job_id="1", spec=spec, output=str(tmp_path / "out"))
    events: list[JobEvent] = []
    jobs.run(launch, events.append, lambda: False)
    assert inspect(tmp_path / "out").quantization
    assert not any(isinstance(event, JobSaved) for event in events)
    assert not (tmp_path / "out" / ".work").exists()


def test_quantize_holds_no_more_than_a_shard_and_a_layer(tmp_path: Path) -> None:
    model = big(tmp_path / "model")
    facts = inspect(model)
    shard = max(one.num_bytes for one in facts.shards)
    layer = sum(tensor.nbytes for name, tensor in tensors_of(model).items() if ".layers.3." in name)
    assert facts.weights_bytes > 4 * (shard + layer)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "out", shard_bytes=shard)
    assert len(inspect(tmp_path / "out").shards) > 1
    assert mx.get_peak_memory() - before <= shard + layer


def test_quantize_measures_with_a_layer_of_each_in_memory(tmp_path: Path) -> None:
    model = big(tmp_path / "model", layers=16)
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "out")
    tensors = tensors_of(model)
    layer = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers.3." in name)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    measure(tmp_path / "out", [[1, 2, 3, 4]], model, lambda done, total: None)
    assert mx.get_peak_memory() - before <= 4 * layer < whole / 3


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


@pytest.mark.parametrize("how", ["uniform", "mixed", "rotated"])
def test_quantize_that_is_killed_anywhere_ends_with_the_same_bytes(how: str, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    options = {"uniform": {"bits": 4, "group_size": 32}, "mixed": MIXED}.get(
        how, {"bits": 4, "group_size": 32, "rotate": True}
    )
    spec = Quantize(model=str(model), **options)
    whole, work = tmp_path / "a" / "out", tmp_path / "w" / "job"
    run_job(spec, whole, work=tmp_path / "v" / "job", shard_bytes=SMALL)
    assert len(inspect(whole).shards) > 2
    deaths = 0
    for death in itertools.count(3, 11):
        count = itertools.count()

        def kill(event: JobEvent, death: int = death, count: Any = count) -> None:
            if next(count) == death:
                raise Killed

        before = set(contents(work)) if work.exists() else set()
        try:
            run_job(spec, tmp_path / "b" / "out", work=work, on_event=kill, shard_bytes=SMALL)
            break
        except Killed:
            deaths += 1
            (work / "shards").mkdir(parents=True, exist_ok=True)
            (work / "shards" / "model-00001.part").write_bytes(b"half")
            if (work / "sensitivity.jsonl").exists():
                with (work / "sensitivity.jsonl").open("a") as file:
                    file.write('{"module": "model.lay')
            assert before - {"shards/model-00001.part"} <= set(contents(work))
    assert deaths >= 2
    assert contents(tmp_path / "b" / "out") == contents(whole)


def test_quantize_writes_no_shard_and_measures_no_module_twice(tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **MIXED)
    saved = 0

    def kill(event: JobEvent) -> None:
        nonlocal saved
        if isinstance(event, JobSaved) and event.resume == "shards":
            raise Killed
        saved += isinstance(event, JobSaved)

    with pytest.raises(Killed):
        run_job(spec, tmp_path / "out", work=tmp_path / "w", on_event=kill, shard_bytes=SMALL)
    assert saved > 20
    [first] = (tmp_path / "w" / "shards").iterdir()
    made = first.stat()
    _, events = run_job(spec, tmp_path / "out", work=tmp_path / "w", shard_bytes=SMALL)
    stages = {event.stage for event in events if isinstance(event, JobStage)}
    assert stages == {"inspect", "quantize", "measure"}
    again = (tmp_path / "out" / first.name).stat()
    assert (made.st_ino, made.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)


def test_quantize_begins_anew_where_model_or_settings_are_others(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "a", work=tmp_path / "w", shard_bytes=SMALL)
    spec = Quantize(model=str(model), **{**UNIFORM, "bits": 8})
    _, events = run_job(spec, tmp_path / "b", work=tmp_path / "w", shard_bytes=SMALL)
    assert any(isinstance(event, JobLog) and event.line.startswith("begins anew") for event in events)
    run_job(spec, tmp_path / "c", shard_bytes=SMALL)
    mine, wanted = contents(tmp_path / "b"), contents(tmp_path / "c")
    assert {name: one for name, one in mine.items() if name.startswith("model")} == {
        name: one for name, one in wanted.items() if name.startswith("model")
    }


@pytest.mark.parametrize("stage", ["inspect", "load", "sensitivity", "quantize", "measure", "end"])
def test_quantize_that_is_cancelled_leaves_nothing(stage: str, tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **MIXED)
    reached = False

    def seen(event: JobEvent) -> None:
        nonlocal reached
        is_last = isinstance(event, JobStage) and event.stage == "measure" and event.done == event.total
        reached = reached or is_last or (isinstance(event, JobStage) and event.stage == stage)

    with pytest.raises(Refused) as refused:
        run_job(spec, tmp_path / "models" / "out", on_event=seen, should_stop=lambda: reached)
    assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN
    assert list((tmp_path / "models").iterdir()) == []


def test_quantize_refuses_an_output_that_exists_unless_it_made_it(tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **UNIFORM)
    (tmp_path / "out").mkdir()
    for work in (None, tmp_path / "j1"):
        with pytest.raises(Refused, match="exists; choose another name") as refused:
            run_job(spec, tmp_path / "out", work=work)
        assert refused.value.failure.code is ErrorCode.CONFLICT
    (tmp_path / "out").rmdir()
    done, _ = run_job(spec, tmp_path / "out", work=tmp_path / "j1")
    again, events = run_job(spec, tmp_path / "out", work=tmp_path / "j1")
    assert again.output == done.output
    assert events == []
    with pytest.raises(Refused, match="exists"):
        run_job(spec, tmp_path / "out", work=tmp_path / "j2")


def test_quantize_says_that_the_disk_is_full_and_goes_on_when_it_is_not(tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **UNIFORM)

    def full(event: JobEvent) -> None:
        if isinstance(event, JobStage) and event.stage == "quantize" and event.done > SMALL:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "w" / "shards"))

    with pytest.raises(Refused, match="No space left on device") as refused:
        run_job(spec, tmp_path / "out", work=tmp_path / "w", on_event=full, shard_bytes=SMALL)
    assert refused.value.failure.code is ErrorCode.DISK_FULL
    assert not list(tmp_path.glob(".out*"))
    assert not list((tmp_path / "w" / "shards").glob("*.part"))
    assert list((tmp_path / "w" / "shards").glob("*.safetensors"))
    run_job(spec, tmp_path / "out", work=tmp_path / "w", shard_bytes=SMALL)


def test_quantize_asks_for_room_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **UNIFORM)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(Refused, match="make room first") as refused:
        run_job(spec, tmp_path / "out")
    assert refused.value.failure.code is ErrorCode.CANNOT_FIT


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        ("[malloc] Unable to allocate 4294967296 bytes.", ErrorCode.CANNOT_FIT),
        ("[metal::malloc] Resource limit exceeded: out of memory", ErrorCode.CANNOT_FIT),
        ("[read] Unable to read 4096 bytes from file.", ErrorCode.BAD_CHECKPOINT),
    ],
)
def test_quantize_says_what_mlx_could_not_do(problem: str, code: ErrorCode, tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), **UNIFORM)

    def fail(event: JobEvent) -> None:
        if isinstance(event, JobStage) and event.stage == "quantize":
            raise RuntimeError(problem)

    with pytest.raises(Refused) as refused:
        run_job(spec, tmp_path / "models" / "out", on_event=fail)
    assert refused.value.failure.code is code
    assert problem in str(refused.value)
    assert list((tmp_path / "models").iterdir()) == []


def broken(folder: Path) -> None:
    """The last shard of two ends in the middle."""
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1000])


def without(folder: Path) -> None:
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def narrow(folder: Path) -> None:
    config, seed = case("llama_tied")
    shutil.rmtree(folder)
    write_model({**config, "intermediate_size": 96}, seed, folder)


def foreign(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "olmo2"}))


FAULTS: dict[str, tuple[Any, dict[str, Any], str, ErrorCode]] = {
    "broken shard": (broken, {}, "model-00002-of-00002.safetensors: truncated", ErrorCode.BAD_CHECKPOINT),
    "missing tensor": (
        without,
        {},
        "tensor model.layers.1.mlp.up_proj.weight is missing",
        ErrorCode.BAD_CHECKPOINT,
    ),
    "family": (
        foreign,
        {},
        "family 'olmo2' cannot be quantized here; those that can: llama,",
        ErrorCode.UNSUPPORTED,
    ),
    "group": (
        narrow,
        {"group_size": 128},
        "no matrix divides into groups of 128 (inputs: 64, 96)",
        ErrorCode.UNSUPPORTED,
    ),
    "group of nvfp4": (None, {"group_size": 16}, "group_size 16 is for nvfp4", ErrorCode.INVALID_REQUEST),
    "bits of a mode": (
        None,
        {"mode": "mxfp8", "bits": 4},
        "mode mxfp8 has 8 bits in groups of 32, and 4",
        ErrorCode.INVALID_REQUEST,
    ),
    "mix of a mode": (
        None,
        {"mode": "mxfp4", "target_bpw": 5},
        "leave one of them out",
        ErrorCode.INVALID_REQUEST,
    ),
    "target too low": (
        None,
        {**MIXED, "target_bpw": 3.0},
        "target_bpw 3 is out of reach: with candidate_bits 3, 4, 8 in groups of 32 this model comes to 5.",
        ErrorCode.INVALID_REQUEST,
    ),
    "target too high": (
        None,
        {**MIXED, "target_bpw": 12.0},
        "target_bpw 12 is out of reach",
        ErrorCode.INVALID_REQUEST,
    ),
    "one candidate": (
        None,
        {**MIXED, "candidate_bits": [4, 4]},
        "candidate_bits are 4; a mix needs two or more",
        ErrorCode.INVALID_REQUEST,
    ),
    "no calibration": (
        None,
        {**MIXED, "calibration": "/nowhere.txt"},
        "/nowhere.txt: No such file",
        ErrorCode.INVALID_REQUEST,
    ),
    "no model": (lambda folder: shutil.rmtree(folder), {}, "no such directory", ErrorCode.BAD_CHECKPOINT),
}


@pytest.mark.parametrize("name", FAULTS)
def test_quantize_refuses_in_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    damage, options, message, code = FAULTS[name]
    model = write_case("llama_tied", tmp_path / "model", shards=2)
    if damage is not None:
        damage(model)
    given = options if "target_bpw" in options or "mode" in options else {**UNIFORM, **options}
    with pytest.raises(Refused) as refused:
        run_job(Quantize(model=str(model), **given), tmp_path / "models" / "out")
    text = str(refused.value)
    assert message in text
    assert "\n" not in text
    assert refused.value.failure.code is code
    assert list((tmp_path / "models").glob("*")) == []


def test_modules_that_do_not_divide_stay_as_they_are_and_are_counted(tmp_path: Path) -> None:
    config, seed = case("llama_tied")
    model = write_model({**config, "intermediate_size": 100}, seed, tmp_path / "model")
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "out")
    made = tensors_of(tmp_path / "out")
    assert "model.layers.0.mlp.down_proj.scales" not in made
    assert "model.layers.0.mlp.up_proj.scales" in made
    layers = config["num_hidden_layers"]
    assert f"{layers} modules, whose inputs do not divide" in (tmp_path / "out" / "README.md").read_text()
    assert np.isfinite(
        measure(tmp_path / "out", [[1, 2, 3]], None, lambda done, total: None).perplexity.value
    )
