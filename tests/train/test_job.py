"""The job as a whole: what it makes and tells, how it goes on after an end at any point, and what it refuses."""

import errno
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from shared.control import LaunchJob
from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobLog, JobMetric, JobSaved, JobStage
from shared.lab import Finetune
from tests.train.lab import AFFINE, chats, curve, model_of, preferences, run_job, write_data
from tests.worker.models.running import one_case_a_family
from worker import jobs
from worker.train import trainer

RESUMED = {
    "sft": {"lora_dropout": 0.2, "grad_accumulation_steps": 2, "lr_schedule": "cosine", "warmup_iters": 2},
    "dpo": {"method": "dpo", "kind": "dora", "learning_rate": 1e-3},
    "orpo": {"method": "orpo", "grad_checkpoint": True, "head_chunk": 16},
}


def spec_for(folder: Path, name: str = "llama_tied", **options: Any) -> Finetune:
    rows = preferences if options.get("method", "sft") != "sft" else chats
    data = write_data(folder / "data", rows(9), rows(3, seed=8))
    how = {"quantize": options.pop("quantize")} if "quantize" in options else {}
    return Finetune(
        model=str(model_of(name, folder, **how)),
        model_id="tiny",
        data=str(data),
        **{
            "iters": 8,
            "batch_size": 2,
            "steps_per_report": 3,
            "steps_per_eval": 4,
            "steps_per_save": 2,
            "learning_rate": 5e-3,
            **options,
        },
    )


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Of everything that is the same in two runs."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.name == "metrics.jsonl":
            lines = [msgspec.json.decode(line, type=JobMetric) for line in file.read_bytes().splitlines()]
            timeless = [
                msgspec.structs.replace(one, tokens_per_s=None, steps_per_s=None, peak_bytes=None)
                for one in lines
            ]
            found[file.name] = msgspec.json.encode(timeless)
        elif file.name == "adapter_config.json":
            found[str(file.relative_to(folder))] = json.dumps(
                {key: value for key, value in json.loads(file.read_text()).items() if key != "job"}
            ).encode()
        elif file.is_file():
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def test_a_run_ends_with_an_adapter_and_tells_how_it_went(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, save_checkpoints=True)
    done, events = run_job(spec, tmp_path / "adapters" / "mine", work=tmp_path / "jobs" / "j1")
    output = Path(done.output)
    config = json.loads((output / "adapter_config.json").read_text())
    assert config["lora_parameters"] == {
        "rank": 8,
        "scale": 1.0,
        "dropout": 0.0,
        "keys": [
            *("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"),
            *("self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"),
        ],
    }
    assert (config["fine_tune_type"], config["num_layers"], config["base_model"]) == ("lora", 3, "tiny")
    weights = mx.load(str(output / "adapters.safetensors"))
    assert isinstance(weights, dict)
    assert weights["model.layers.0.self_attn.q_proj.lora_a"].shape == (64, 8)
    assert weights["model.layers.2.mlp.down_proj.lora_b"].shape == (8, 64)
    metrics = [event for event in events if isinstance(event, JobMetric)]
    assert [(one.kind, one.step) for one in metrics] == [
        *(("val", 0), ("train", 3), ("val", 4), ("train", 6), ("train", 8), ("val", 8)),
    ]
    lines = (output / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=JobMetric) for line in lines] == metrics
    told = metrics[1]
    measured = (told.grad_norm, told.tokens, told.tokens_per_s, told.steps_per_s, told.peak_bytes)
    assert all(one is not None and one > 0 for one in measured)
    assert [event.step for event in events if isinstance(event, JobSaved)] == [2, 4, 6]
    stages = [event.stage for event in events if isinstance(event, JobStage)]
    assert list(dict.fromkeys(stages)) == ["inspect", "tokenize", "load", "train"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-4", "step-8"]
    last = output / "checkpoints" / "step-8" / "adapters.safetensors"
    assert last.read_bytes() == (output / "adapters.safetensors").read_bytes()
    assert "8 steps, loss" in done.summary
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("method", RESUMED)
def test_a_run_that_is_killed_at_any_save_ends_with_the_same_bytes(method: str, tmp_path: Path) -> None:
    spec = spec_for(tmp_path, save_checkpoints=True, **RESUMED[method])
    run_job(spec, tmp_path / "whole", work=tmp_path / "w")
    wanted = bytes_of(tmp_path / "whole")
    resume = ""
    for number in range(1, 5):  # each start gets to its first save, and no further

        def kill(event: JobEvent) -> None:
            nonlocal resume
            if isinstance(event, JobSaved):
                resume = event.resume
                raise Killed

        try:
            _, events = run_job(spec, tmp_path / "out", work=tmp_path / "work", resume=resume, on_event=kill)
        except Killed:
            assert resume == f"step-{2 * number:08d}"
            continue
        assert any(isinstance(event, JobLog) and "goes on after step 6" in event.line for event in events)
    assert bytes_of(tmp_path / "out") == wanted


@pytest.mark.parametrize("share", [0.1, 0.55, 0.7, 0.85, 1.0])
def test_a_run_that_is_stopped_saves_first_and_goes_on_to_the_same_bytes(
    share: float, tmp_path: Path
) -> None:
    """`share`: of all the times that the run asks whether it shall stop."""
    spec = spec_for(tmp_path, steps_per_save=0)
    asked, most = 0, 10**9

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= most

    run_job(spec, tmp_path / "whole", work=tmp_path / "w", should_stop=stop)
    asked, most = 0, round(asked * share)
    work, saved = tmp_path / "work", ""

    def look(event: JobEvent) -> None:
        nonlocal saved
        saved = event.resume if isinstance(event, JobSaved) else saved

    with pytest.raises(Refused) as refused:
        run_job(spec, tmp_path / "out", work=work, should_stop=stop, on_event=look)
    assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN
    assert bool(saved) == (share > 0.5)
    assert not (tmp_path / "out").exists()
    run_job(spec, tmp_path / "out", work=work, resume=saved)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_stop_within_a_step_is_told_as_a_save(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, steps_per_save=0, steps_per_eval=0)
    steps = 0

    def count(event: JobEvent) -> None:
        nonlocal steps
        steps += isinstance(event, JobStage) and event.stage == "train"

    saved: list[JobEvent] = []

    def look(event: JobEvent) -> None:
        count(event)
        saved.extend([event] if isinstance(event, JobSaved) else [])

    with pytest.raises(Refused, match="stopped after step 3, from where it can go on"):
        run_job(spec, tmp_path / "out", work=tmp_path / "work", on_event=look, should_stop=lambda: steps == 3)
    assert saved == [JobSaved("step-00000003", 3)]


@pytest.mark.parametrize("damage", ["cut", "gone", "foreign", "version"])
def test_a_checkpoint_that_cannot_be_used_is_told_and_an_older_one_is_taken(
    damage: str, tmp_path: Path
) -> None:
    spec = spec_for(tmp_path)
    run_job(spec, tmp_path / "whole", work=tmp_path / "w")
    work = tmp_path / "work"

    def kill(event: JobEvent) -> None:
        if isinstance(event, JobSaved) and event.step == 6:
            raise Killed

    with pytest.raises(Killed):
        run_job(spec, tmp_path / "out", work=work, on_event=kill)
    last = work / "step-00000006"
    if damage == "cut":
        (last / "state.safetensors").write_bytes((last / "state.safetensors").read_bytes()[:500])
    elif damage == "gone":
        (last / "state.json").unlink()
    else:
        values = json.loads((last / "state.json").read_text())
        values |= {"digest": "x"} if damage == "foreign" else {"version": 0}
        (last / "state.json").write_text(json.dumps(values))
    _, events = run_job(spec, tmp_path / "out", work=work, resume=last.name)
    logs = [event.line for event in events if isinstance(event, JobLog)]
    assert any(line.startswith("cannot go on from a checkpoint: step-00000006") for line in logs)
    assert any("goes on after step 4" in line for line in logs)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_what_this_very_job_has_published_is_its_end_and_what_another_has_is_refused(tmp_path: Path) -> None:
    spec = spec_for(tmp_path)
    done, _ = run_job(spec, tmp_path / "out", work=tmp_path / "j1")
    again, events = run_job(spec, tmp_path / "out", work=tmp_path / "j1", resume="step-00000006")
    assert again == done
    assert events == []
    for work in (tmp_path / "j2", None):
        with pytest.raises(Refused, match="exists; choose another name") as refused:
            run_job(spec, tmp_path / "out", work=work)
        assert refused.value.failure.code is ErrorCode.CONFLICT


@pytest.mark.parametrize("method", ["sft", "dpo", "orpo"])
def test_a_run_without_a_folder_for_checkpoints_makes_the_same(method: str, tmp_path: Path) -> None:
    spec = spec_for(tmp_path, method=method, save_checkpoints=True)
    launch = LaunchJob(job_id="1", spec=spec, output=str(tmp_path / "a"))
    events: list[JobEvent] = []
    jobs.run(launch, events.append, lambda: False)
    assert not any(isinstance(event, JobSaved) for event in events)
    launch = msgspec.structs.replace(launch, output=str(tmp_path / "b"), work=str(tmp_path / "work"))
    jobs.run(launch, events.append, lambda: False)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    told = [event for event in events if isinstance(event, JobMetric)]
    assert all((one.accuracy is None) == (method == "sft") for one in told)


@pytest.mark.parametrize("name", [*one_case_a_family(), "quantized"])
def test_every_family_learns(name: str, tmp_path: Path) -> None:
    more = {"quantize": AFFINE} if name == "quantized" else {}
    spec = spec_for(
        tmp_path,
        "llama_tied" if more else name,
        iters=12,
        steps_per_report=1,
        steps_per_eval=0,
        scale=4.0,
        rank=4,
        **more,
    )
    _, events = run_job(spec, tmp_path / "out")
    losses = curve(events)
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_preferences_are_learned(method: str, tmp_path: Path) -> None:
    """Those that it was trained on: a dozen pairs and a random model say nothing of others."""
    spec = spec_for(
        tmp_path,
        method=method,
        iters=40,
        steps_per_eval=40,
        scale=4.0,
        orpo_lambda=1.0,
        dpo_beta=0.5,
    )
    write_data(Path(spec.data), preferences(9), preferences(9))
    _, events = run_job(spec, tmp_path / "out")
    told = [event for event in events if isinstance(event, JobMetric) and event.kind == "val"]
    assert told[-1].loss < told[0].loss
    margins = [one.margin or 0.0 for one in told]
    assert margins[-1] > margins[0] + 0.1
    assert told[-1].accuracy == 1.0


def test_a_run_begins_where_another_adapter_ends(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, scale=2.0)
    done, first = run_job(spec, tmp_path / "a")
    more = msgspec.structs.replace(spec, warm_start_adapter=done.output, rank=12, scale=3.0)
    _, second = run_job(more, tmp_path / "b")
    assert curve(second, "val")[0] == pytest.approx(curve(first, "val")[-1], abs=1e-4)


def test_rows_are_held_out_where_there_is_no_file_of_them(tmp_path: Path) -> None:
    spec = spec_for(tmp_path)
    write_data(Path(spec.data), chats(25))
    (Path(spec.data) / "valid.jsonl").unlink()
    _, events = run_job(spec, tmp_path / "out")
    logs = [event.line for event in events if isinstance(event, JobLog)]
    assert "no valid.jsonl: the last 2 rows of train.jsonl are held out" in logs
    assert any(line.startswith("train: 23 rows") for line in logs)
    assert len(curve(events, "val")) == 3


def test_rows_that_are_too_long_are_cut_and_those_with_nothing_left_are_named(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, max_seq_length=60, sft_scope="response", steps_per_eval=0)
    long = {"messages": [{"role": "user", "content": "why " * 40}, {"role": "assistant", "content": "so"}]}
    write_data(Path(spec.data), [*chats(6), long])
    _, events = run_job(spec, tmp_path / "out")
    logs = [event.line for event in events if isinstance(event, JobLog)]
    assert any("cut at max_seq_length 60; 1 left out" in line and "(train.jsonl 7)" in line for line in logs)


ROWS: dict[str, list[Any]] = {
    "chats": chats(4),
    "preferences": preferences(4),
    "texts": [{"text": "one two"}] * 3,
    "ends with the user": [{"messages": [{"role": "user", "content": "hi"}]}],
    "tools that are none": [{**chats(1)[0], "tools": [{"function": {"name": 3}}]}],
}
FAULTS = [
    ("chats", {"method": "dpo"}, "dpo needs rows of prompt, chosen and rejected, or choose method sft"),
    ("preferences", {}, "choose method dpo or orpo for them"),
    ("texts", {"sft_scope": "response"}, "train.jsonl: line 1: a text has no response"),
    ("ends with the user", {"sft_scope": "response"}, "line 1: the last message is not the assistant's"),
    ("tools that are none", {}, "line 1: tools are not as OpenAI has them"),
    ("chats", {"target_modules": ["wq"]}, "the model has no 'wq'; there are down_proj, gate_proj"),
    ("chats", {"num_layers": 4}, "num_layers is 4, and the model has 3 layers"),
    ("chats", {"num_layers": 0}, "num_layers is 0"),
    ("chats", {"max_seq_length": 8, "sft_scope": "response"}, "no row has a token to learn within"),
    ("chats", {"warmup_iters": 8}, "warmup_iters is 8, and there are 8 iters"),
    ("chats", {"like_mlx_lm": True, "batch_size": 5}, "batch_size 5 asks for more rows than the 4"),
    ("chats", {"learning_rate": 1e30, "grad_clip_norm": 0.0, "iters": 40}, "choose a lower learning_rate"),
    ("chats", {"warm_start_adapter": "/nowhere"}, "/nowhere: cannot be read as an adapter"),
    ("chats", {"data": "/nowhere"}, "/nowhere: there is no such folder"),
    ("chats", {"model": "/nowhere"}, "/nowhere"),
]


@pytest.mark.parametrize(("rows", "options", "reason"), FAULTS, ids=lambda one: str(one)[:40])
def test_what_cannot_be_trained_is_refused_in_a_line(
    rows: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    spec = spec_for(tmp_path)
    write_data(Path(spec.data), ROWS[rows])
    (Path(spec.data) / "valid.jsonl").unlink()
    with pytest.raises(Refused) as refused:
        run_job(msgspec.structs.replace(spec, **options), tmp_path / "adapters" / "out")
    message = refused.value.failure.message
    assert reason in message
    assert "\n" not in message
    assert refused.value.failure.code is not ErrorCode.INTERNAL
    assert not list((tmp_path / "adapters").glob("*")) if (tmp_path / "adapters").exists() else True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "dora"}, "is lora; choose kind lora"),
        ({"rank": 4}, "has rank 8 there; choose rank 8 or more"),
        ({"target_modules": ["q_proj"]}, "which is not trained here; choose target_modules"),
    ],
)
def test_an_adapter_of_another_shape_is_no_beginning(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    spec = spec_for(tmp_path, steps_per_eval=0)
    done, _ = run_job(spec, tmp_path / "a")
    with pytest.raises(Refused, match=reason):
        run_job(msgspec.structs.replace(spec, warm_start_adapter=done.output, **change), tmp_path / "b")
    other = msgspec.structs.replace(spec, model=str(model_of("llama_head_dim", tmp_path)))
    with pytest.raises(Refused, match="it is of another model"):
        run_job(msgspec.structs.replace(other, warm_start_adapter=done.output), tmp_path / "b")


@pytest.mark.parametrize(
    "error", [RuntimeError("[malloc] Unable to allocate 9000 bytes."), MemoryError("no")], ids=str
)
def test_out_of_memory_names_the_last_step_the_peak_and_what_helps(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = trainer.update, 0

    def update(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error
        return real(*args)

    monkeypatch.setattr(trainer, "update", update)
    with pytest.raises(Refused) as refused:
        run_job(spec_for(tmp_path, grad_checkpoint=True), tmp_path / "out", work=tmp_path / "work")
    failure = refused.value.failure
    assert failure.code is ErrorCode.CANNOT_FIT
    assert failure.message.startswith("out of memory after step 3, at ")
    assert failure.message.endswith(
        "try a smaller batch_size, a smaller max_seq_length, segment_size 4, head_chunk 256"
    )


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("worker.jobs.finetune_saves.publish", no_room)
    with pytest.raises(Refused, match="No space left") as refused:
        run_job(spec_for(tmp_path), tmp_path / "out", work=tmp_path / "work")
    assert refused.value.failure.code is ErrorCode.DISK_FULL


def test_any_other_fault_of_a_step_is_a_bug_and_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("[matmul] shapes do not fit")

    monkeypatch.setattr(trainer, "update", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run_job(spec_for(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
