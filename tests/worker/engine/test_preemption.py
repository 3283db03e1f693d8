"""The scheduler under a KV budget: promises stay within it, everybody comes to an end, in the order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_layout import LayerKv
from worker.engine.kv_budget import BLOCK, KvBudget
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import SamplingPlan, Sequence, Status

TOKEN = 8  # bytes


def scheduler(blocks: float, max_rows: int = 8, chunk: int = 64) -> Scheduler:
    kv = KvBudget([LayerKv(1, 1)], 4, chunk, int(blocks * BLOCK * TOKEN))
    return Scheduler(max_rows=max_rows, prefill_chunk=chunk, kv=kv)


def sequence(name: str, prompt: int, max_tokens: int) -> Sequence:
    return Sequence(name, range(prompt), max_tokens, SamplingPlan(), 0, frozenset())


def run(scheduler: Scheduler, steps: int) -> list[str]:
    """Steps whose tokens are read at once; who was preempted."""
    preempted = []
    for _ in range(steps):
        scheduler.admit()
        step = scheduler.schedule()
        preempted += [old.id for old, _ in step.preempted]
        sampled = [*step.decode, *(row for row, _ in step.prefill if not row.num_to_prefill)]
        for row in sampled:
            row.generated.append(0)
            if row.num_generated == row.max_tokens:
                scheduler.remove(row)
    return preempted


@pytest.mark.parametrize(
    ("blocks", "rows", "admitted"),
    [
        (4, [(100, 900)] * 3, 2),  # a prompt and a block of the answer: two blocks each
        (4, [(100, 50)] * 8, 4),  # a whole answer is less than a block
        (4, [(600, 400), (10, 10)], 1),  # the head of the line waits, and so does who would fit
        (4, [(10, 10), (600, 400), (10, 10)], 1),
        (0, [(1000, 1000)] * 9, 8),  # no budget: rows are the limit
    ],
)
def test_rows_are_admitted_in_order_while_their_prompt_and_first_block_fit(blocks, rows, admitted):
    line = scheduler(blocks)
    for n, (prompt, max_tokens) in enumerate(rows):
        line.add(sequence(str(n), prompt, max_tokens))
    assert [row.id for row in line.admit()] == [str(n) for n in range(admitted)]
    assert line.promised_bytes == sum(line.kv.row_bytes(row.promised) for row in line.active)


def test_the_newest_row_gives_way_and_comes_back_first_from_where_it_was():
    line = scheduler(blocks=6)
    for name in "abcd":
        line.add(sequence(name, 10, 1000))
    assert run(line, 500) == []
    assert [row.id for row in line.active] == ["a", "b", "c"]
    assert run(line, 40) == ["c"]  # for the third blocks of a and b
    assert [row.id for row in line.waiting] == ["c", "d"]
    assert run(line, 250) == ["b"]  # for the fourth of a
    assert [row.id for row in line.active] == ["a"]
    assert [row.id for row in line.waiting] == ["b", "c", "d"]
    b = line.waiting[0]
    assert b.was_preempted
    assert len(b.prompt) == 10 + b.num_resumed
    assert b.num_resumed > 740


def test_a_budget_that_shrinks_keeps_no_row_from_its_end():
    """Rows go on with what they were promised; one that needs more than there is now gets it when it is alone."""
    line = scheduler(blocks=8)
    for name in "abc":
        line.add(sequence(name, 10, 1000))
    assert run(line, 300) == []
    line.resize(1 * BLOCK * TOKEN)
    assert len(line.active) == 3
    assert run(line, 300) == ["c", "b"]
    assert run(line, 300) == []
    assert [row.id for row in line.active] == ["a"]
    assert run(line, 2300) == []
    assert not line.has_work
    assert line.promised_bytes == 0


def test_a_budget_that_grows_lets_the_next_in():
    line = scheduler(blocks=4)
    for name in "abc":
        line.add(sequence(name, 100, 900))
    line.admit()
    line.resize(6 * BLOCK * TOKEN)
    assert [row.id for row in line.admit()] == ["c"]
    line.add(sequence("d", 100, 900))
    line.resize(0)  # no limit
    assert [row.id for row in line.admit()] == ["d"]


def test_what_a_row_was_promised_is_free_when_it_leaves():
    line = scheduler(blocks=4)
    rows = [sequence(name, 100, 900) for name in "ab"]
    for row in rows:
        line.add(row)
    line.admit()
    assert line.promised_bytes == 4 * BLOCK * TOKEN
    line.remove(rows[0])
    line.remove(rows[0])
    assert line.promised_bytes == 2 * BLOCK * TOKEN
    line.remove(rows[1])
    assert line.promised_bytes == 0


@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 900), st.integers(0, 60)), min_size=1, max_size=7
    ),
    slack=st.integers(0, 3),
    max_rows=st.integers(1, 4),
    late=st.booleans(),
    data=st.data(),
)
def test_promises_are_kept_and_everybody_comes_to_an_end(arrivals, slack, max_rows, late, data):
    """Random arrivals and cancels, and tokens that are read at once or a step late, as the engine does."""
    longest = max(-(-(prompt + answer) // BLOCK) for prompt, answer, _ in arrivals)
    line = scheduler(longest + slack, max_rows, chunk=200)
    order = {
        str(n): place for place, n in enumerate(sorted(range(len(arrivals)), key=lambda n: arrivals[n][2]))
    }
    due = list(order)
    said: dict[str, int] = dict.fromkeys(order, 0)
    cancelled: set[str] = set()
    unread: list[Sequence] = []
    for tick in range(60_000):
        while due and arrivals[int(due[0])][2] <= tick:
            name = due.pop(0)
            line.add(sequence(name, *arrivals[int(name)][:2]))
        if tick % 97 == 96 and line.has_work and data.draw(st.integers(0, 3), label="cancel?") == 0:
            victim = data.draw(st.sampled_from([*line.active, *line.waiting]), label="whom")
            cancelled.add(victim.id)
            line.remove(victim)
        line.admit()
        oldest = line.active[0] if line.active else None
        step = line.schedule()
        assert line.promised_bytes == sum(line.kv.row_bytes(row.promised) for row in line.active)
        assert line.promised_bytes <= line.kv.limit
        assert all(row.num_cached <= row.promised for row in line.active)
        assert oldest is None or oldest.status is not Status.FINISHED
        standing = [order[row.id] for row in [*line.active, *line.waiting]]
        assert standing == sorted(standing)  # first come, first served, whoever gave way
        drawn = [*step.decode, *(row for row, _ in step.prefill if not row.num_to_prefill)]
        ready, unread = (unread, drawn) if late else (drawn, [])
        for row in ready:
            if row.status is Status.FINISHED:  # cancelled or preempted: its token is not said
                continue
            row.generated.append(0)
            said[row.id] += 1
            assert row.num_generated == said[row.id]
            if row.num_generated == row.max_tokens:
                line.remove(row)
        if not due and not line.has_work:
            break
    assert not line.has_work
    assert line.promised_bytes == 0
    for name, count in said.items():
        assert count == arrivals[int(name)][1] or name in cancelled
