"""The small parts of the job machinery: retention, turns, spools, estimates, advice, views."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.jobs import estimate
from parent.jobs.advice import advice
from parent.jobs.memory_watch import MemoryWatch
from parent.jobs.policy import Policy
from parent.jobs.record import Folder, JobRecord, decoded, encoded, told
from parent.jobs.retention import Retention, forgotten
from parent.jobs.store import Finished
from parent.jobs.turn import Turn
from shared import ndjson
from shared.control import Fatal, FromWorker, JobUpdate
from shared.errors import ErrorCode, Failure
from shared.jobs import JobDone, JobLog, JobStage
from shared.lab import Finetune, Quantize
from worker.jobs.outbox import Outbox

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("terms", "folders", "gone"),
    [
        (Retention(), {}, []),
        (Retention(keep_s=24), {}, ["c", "d"]),
        (Retention(most_jobs=1), {}, ["b", "c", "d"]),
        (Retention(most_bytes=200), {}, ["c", "d"]),
        (Retention(most_bytes=450), {"b": 300}, ["b", "c", "d"]),
        (Retention(most_bytes=0), {}, ["a", "b", "c", "d"]),
    ],
)
def test_the_oldest_are_forgotten_by_age_by_number_and_by_bytes(
    terms: Retention, folders: dict[str, int], gone: list[str]
) -> None:
    jobs = [Finished(name, 100.0 - 10 * place, 100) for place, name in enumerate("abcd")]
    assert forgotten(jobs, folders, 105.0, terms) == gone


def test_jobs_wait_while_answers_run_and_a_moment_longer() -> None:
    async def main() -> None:
        changed = asyncio.Event()
        turn = Turn(lambda: Policy(quiet_s=0.01), changed.set)
        assert not turn.should_wait
        turn.answers(True)
        assert turn.should_wait
        turn.answers(False)
        assert turn.should_wait
        turn.answers(True)  # before it was quiet
        turn.answers(False)
        turn.answers(False)
        changed.clear()
        await asyncio.wait_for(changed.wait(), 10)
        assert not turn.should_wait
        exclusive = Turn(lambda: Policy(yields=False), changed.set)
        exclusive.answers(True)
        assert not exclusive.should_wait
        turn.close()

    asyncio.run(main())


# ---------------------------------------------------------------- what is told again


class Parent:
    """Hears as the queue does: only the next number, and only what is written down counts."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.seq = 0

    def take(self, message: FromWorker) -> None:
        if isinstance(message, JobUpdate) and message.seq == self.seq + 1:
            self.seq = message.seq
            self.heard.append(getattr(message.event, "line", "") or getattr(message.event, "stage", ""))


@given(
    st.lists(st.sampled_from(["tell", "stage", "lose", "come back", "acknowledge", "die"]), max_size=40),
)
def test_whatever_is_lost_between_every_line_is_heard_once_and_in_order(moves: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        patch.setattr("worker.jobs.outbox.SPOOL_BYTES", 100)
        parent, is_there = Parent(), True
        outbox = Outbox(lambda message: parent.take(message) if is_there else None, folder / "spool")
        lines: list[str] = []
        for number, move in enumerate(moves):
            match move:
                case "tell":
                    lines.append(f"line {number}")
                    outbox.tell(JobLog(lines[-1]))
                case "stage":
                    name = f"stage {number % 3}"
                    if not lines or name != next(
                        (each for each in reversed(lines) if each.startswith("stage")), ""
                    ):
                        lines.append(name)
                    outbox.tell(JobStage(name, number, 100))
                case "lose":
                    is_there = False
                case "come back" if not is_there:
                    is_there = True
                    outbox.tell_again(parent.seq)
                case "acknowledge" if is_there:
                    outbox.heard(parent.seq)
                case "die":
                    break
        for message in told(folder / "spool", parent.seq):  # the process is dead: the file has the rest
            assert isinstance(message, JobUpdate)
            parent.take(message)
        assert parent.heard == lines


class _folder:
    """hypothesis runs a test many times over one `tmp_path`."""

    def __enter__(self) -> Path:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        return Path(self.folder.name)

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()


def test_a_file_that_a_full_disk_has_torn_gives_what_is_whole(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    lines = [ndjson.encode(JobUpdate(JobLog(str(number)), number)) for number in range(1, 5)]
    spool.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2] + b"\xff\xfe\n" + lines[3][:-5])
    found = [message.seq for message in told(spool, 0) if isinstance(message, JobUpdate)]
    assert found == [1, 3]
    assert told(tmp_path / "none", 0) == []


def test_the_last_words_of_a_process_are_in_its_file(tmp_path: Path) -> None:
    outbox = Outbox(lambda message: None, tmp_path / "spool")
    outbox.tell(JobDone("/out", "well"))
    outbox.fail(Failure(ErrorCode.INTERNAL, "a bug"))
    assert told(tmp_path / "spool", 0) == [
        JobUpdate(JobDone("/out", "well"), 1),
        Fatal(Failure(ErrorCode.INTERNAL, "a bug")),
    ]
    assert told(tmp_path / "spool", 1) == [Fatal(Failure(ErrorCode.INTERNAL, "a bug"))]


def test_without_a_file_nothing_is_numbered_or_kept() -> None:
    sent: list[FromWorker] = []
    outbox = Outbox(sent.append)
    outbox.tell(JobLog("a"))
    outbox.tell_again(0)
    assert sent == [JobUpdate(JobLog("a"))]


def test_the_record_of_a_process_survives_the_row_and_another_version() -> None:
    record = JobRecord(pid=7, start_time=1.5, adopt_socket="/run/j1.ctl", nonce="n", wire=3)
    assert decoded(encoded(record)) == record
    assert decoded("{}") is None
    assert decoded('{"pid": 0, "start_time": 1}') is None
    assert decoded("no json") is None


def test_a_folder_is_made_anew_for_each_attempt_and_keeps_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "job_1")
    folder.make(1)
    (folder.scratch / "x").write_text("x")
    (folder.path / "step-1").write_text("checkpoint")
    folder.make(2)
    assert not (folder.scratch / "x").exists()
    assert not folder.spool(1).exists()
    folder.tidy(keep=True)
    assert [path.name for path in folder.path.iterdir()] == ["step-1"]
    assert folder.size() == 10
    folder.tidy(keep=False)
    assert not folder.path.exists()


# ---------------------------------------------------------------- numbers and words


def test_the_estimate_of_a_training_grows_with_what_makes_it_grow() -> None:
    base = Finetune(model="/m", data="/d", batch_size=2, max_seq_length=256)
    needs = estimate.finetune(base, 10_000_000, CONFIG)
    assert needs > 10_000_000

    def other(**fields: object) -> int:
        spec = Finetune(**({"model": "/m", "data": "/d", "batch_size": 2, "max_seq_length": 256} | fields))  # type: ignore[arg-type]
        return estimate.finetune(spec, 10_000_000, CONFIG)

    for larger in ({"batch_size": 4}, {"max_seq_length": 512}, {"rank": 64}, {"method": "dpo"}):
        assert other(**larger) > needs, larger
    for smaller in ({"grad_checkpoint": True}, {"segment_size": 1}, {"head_chunk": 16}, {"num_layers": 1}):
        assert other(**smaller) < needs, smaller
    assert estimate.finetune(base, 1000, {}) > 1000  # nothing is known of its sizes


def test_the_estimate_of_a_quantization_is_a_shard_and_a_layer_unless_the_model_is_run() -> None:
    weights, stored = 40 << 30, 20 << 30
    plain = estimate.quantize(Quantize(model="/m", measure=False), weights, stored, CONFIG)
    assert plain == (5 << 30) + 3 * (weights // 4) + estimate.BASE_BYTES
    assert estimate.quantize(Quantize(model="/m"), weights, stored, CONFIG) > weights
    mixed = Quantize(model="/m", measure=False, target_bpw=4.5)
    assert estimate.quantize(mixed, weights, stored, CONFIG) > weights


@pytest.mark.parametrize(
    ("available", "kills", "short"),
    [([0.5, 0.5], [3, 3], False), ([0.5, 0.01], [3, 3], True), ([0.5, 0.5], [3, 4], True)],
)
def test_a_machine_without_memory_is_known_by_its_numbers(
    available: list[float], kills: list[int], short: bool
) -> None:
    watch = MemoryWatch(lambda: available.pop(0), lambda: kills.pop(0))
    watch.look()
    assert watch.is_short() is short


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("finetune", ErrorCode.CANNOT_FIT, "a smaller batch_size"),
        ("noop", ErrorCode.CANNOT_FIT, "unload models"),
        ("finetune", ErrorCode.ENGINE_UNAVAILABLE, "from the last checkpoint"),
        ("noop", ErrorCode.ENGINE_UNAVAILABLE, "begins it again"),
        ("noop", ErrorCode.DISK_FULL, "free some room"),
        ("noop", ErrorCode.CONFLICT, ""),
    ],
)
def test_a_failure_comes_with_what_may_be_done(kind: str, code: ErrorCode, says: str) -> None:
    found = advice(kind, Failure(code, "no"))
    assert says in found if says else found == ""
