"""The scheduler: decode first, one prefill at a time, nobody starves, nobody runs past its budget."""

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.scheduler import Scheduler
from worker.engine.sequence import SamplingPlan, Sequence, Status


def sequence(name: str, prompt: int, max_tokens: int = 4) -> Sequence:
    return Sequence(name, list(range(prompt)), max_tokens, SamplingPlan(), 0, frozenset())


def names(step):
    first = step.prefill[0][0].id if step.prefill else None
    return [s.id for s in step.decode], first, step.num_prefill


def test_a_prompt_runs_in_chunks_and_its_last_chunk_samples():
    scheduler = Scheduler(max_rows=2, prefill_chunk=4)
    one = sequence("a", 10)
    scheduler.add(one)
    scheduler.admit()
    assert [names(scheduler.schedule()) for _ in range(3)] == [([], "a", 4), ([], "a", 4), ([], "a", 2)]
    assert one.status is Status.DECODE
    assert one.num_sampled == 1
    assert names(scheduler.schedule()) == (["a"], None, 0)


def test_running_rows_go_on_while_a_long_prompt_is_prefilled():
    scheduler = Scheduler(max_rows=2, prefill_chunk=4)
    scheduler.add(sequence("short", 2, max_tokens=10))
    scheduler.admit()
    scheduler.schedule()
    scheduler.add(sequence("long", 12))
    scheduler.admit()
    for _ in range(3):
        decoding, prefilling, _ = names(scheduler.schedule())
        assert decoding == ["short"]
        assert prefilling == "long"


def test_rows_are_bounded_and_admission_is_first_come_first_served():
    scheduler = Scheduler(max_rows=2, prefill_chunk=8)
    rows = [sequence(name, 3) for name in "abc"]
    for row in rows:
        scheduler.add(row)
    assert [s.id for s in scheduler.admit()] == ["a", "b"]
    assert scheduler.admit() == []
    scheduler.remove(rows[0])
    assert [s.id for s in scheduler.admit()] == ["c"]


def test_a_row_is_not_scheduled_past_its_budget():
    scheduler = Scheduler(max_rows=1, prefill_chunk=8)
    scheduler.add(sequence("a", 3, max_tokens=2))
    scheduler.admit()
    assert bool(scheduler.schedule())
    assert names(scheduler.schedule()) == (["a"], None, 0)
    assert not scheduler.schedule()


def test_a_resumed_row_counts_what_it_has_said_already():
    row = sequence("a", 5, max_tokens=3)
    row.num_resumed = 2
    scheduler = Scheduler(max_rows=1, prefill_chunk=8)
    scheduler.add(row)
    scheduler.admit()
    scheduler.schedule()
    assert not scheduler.schedule()  # one token was left


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 9),
    st.data(),
)
def test_every_sequence_runs_exactly_its_prompt_and_its_budget(arrivals, max_rows, chunk, data):
    """Random arrivals and cancels: each step is bounded, progress is made, nothing runs twice or too far."""
    scheduler = Scheduler(max_rows=max_rows, prefill_chunk=chunk)
    rows = {str(n): sequence(str(n), prompt, budget) for n, (prompt, budget, _) in enumerate(arrivals)}
    due = sorted(rows, key=lambda name: arrivals[int(name)][2])
    ran = dict.fromkeys(rows, 0)
    cancelled: set[str] = set()
    for tick in range(1000):
        while due and arrivals[int(due[0])][2] <= tick:
            scheduler.add(rows[due.pop(0)])
        if data.draw(st.integers(0, 9), label="cancel?") == 0 and scheduler.active:
            victim = scheduler.active[0]
            cancelled.add(victim.id)
            scheduler.remove(victim)
        scheduler.admit()
        assert len(scheduler.active) <= max_rows
        step = scheduler.schedule()
        assert step.num_prefill <= chunk
        assert bool(step) or not scheduler.active or not scheduler.has_work
        for row in step.decode:
            ran[row.id] += 1
        for row, count in step.prefill:
            ran[row.id] += count
        for row in list(scheduler.active):  # what the engine does when a row's last token is read
            if row.status is Status.DECODE and row.num_sampled == row.max_tokens:
                scheduler.remove(row)
        if not due and not scheduler.has_work:
            break
    assert not scheduler.has_work
    for name, row in rows.items():
        assert row.status is Status.FINISHED
        whole = len(row.prompt) + row.max_tokens - 1  # the last token is sampled, not run
        assert ran[name] == whole if name not in cancelled else ran[name] <= whole
