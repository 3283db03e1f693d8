"""The ledger, the bills, and the words of its refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.pool.ledger import Bill, Grant, Ledger, OverBudget
from shared.errors import ErrorCode

BYTES = st.integers(0, 10**12)
BILLS = st.builds(
    Bill, weights=BYTES, transient=BYTES, adapters=BYTES, kv_least=BYTES, kv_wish=BYTES, prefix_wish=BYTES
)


@given(BILLS, BYTES)
def test_a_grant_is_within_its_room_where_the_least_is_and_never_above_the_wish(
    bill: Bill, room: int
) -> None:
    grant = bill.grant(room)
    assert grant.total <= max(room, bill.least)
    assert grant.total <= bill.wish
    assert grant.kv >= bill.kv_least


@given(BILLS, BYTES, BYTES)
def test_a_smaller_grant_gives_up_what_is_asked_down_to_the_least(bill: Bill, room: int, size: int) -> None:
    grant = bill.grant(room)
    less = grant.less(size, bill)
    assert less.total == max(grant.total - size, bill.least)
    assert less.kv >= bill.kv_least
    assert less.kv == grant.kv or less.prefix == 0  # kept prompts go first


def test_ledger_charges_the_larger_of_promise_and_measurement() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 40)
    assert ledger.free == 60
    ledger.measure("a", 70)
    assert ledger.free == 30
    ledger.measure("a", 10)
    assert ledger.free == 60
    ledger.release("a")
    ledger.release("a")
    assert ledger.free == 100


def test_ledger_refuses_what_does_not_fit_and_a_second_account_of_one_name() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60)
    with pytest.raises(OverBudget):
        ledger.reserve("b", 41)
    with pytest.raises(ValueError, match="a has an account already"):
        ledger.reserve("a", 1)
    ledger.reserve("job", 40, kind="job")
    assert (ledger.count("model"), ledger.count("job")) == (1, 1)


def test_ledger_settles_on_the_weights_that_were_measured() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60, grant=Grant(40, 5, 10, 5))
    ledger.settle("a", 42)
    assert ledger.held_by("a") == 62
    ledger.settle("a", 0)  # a worker that does not know
    assert ledger.held_by("a") == 62


def test_ledger_charges_an_adopted_worker_whether_it_fits_or_not() -> None:
    ledger = Ledger(10)
    ledger.adopt("a", 5, 30)
    assert ledger.free == -20


def test_ledger_missing_bytes_lower_the_budget_until_they_come_back() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60)
    ledger.release("a", missing=25)
    assert (ledger.leaked, ledger.usable, ledger.free) == (25, 75, 75)
    ledger.recover("a", 5)
    assert ledger.free == 95
    ledger.recover("a", 0)
    assert ledger.free == 100


@pytest.mark.parametrize(
    ("missing", "pinned", "words"),
    [
        (
            0,
            0,
            [
                "needs 60 GB",
                "weights 50 GB",
                "KV of one request 10 GB",
                "budget is 40 GB",
                "memory_budget_bytes",
            ],
        ),
        (10 * 10**9, 0, ["at most 30 GB", "10 GB of it did not come back"]),
        (0, 5 * 10**9, ["at most 35 GB", "pinned models hold 5 GB"]),
    ],
)
def test_ledger_says_with_numbers_why_something_can_never_fit(
    missing: int, pinned: int, words: list[str]
) -> None:
    ledger = Ledger(40 * 10**9)
    ledger.release("x", missing)
    bill = Bill(weights=50 * 10**9, kv_least=10 * 10**9, kv_wish=99 * 10**9)
    failure = ledger.never_fits("m", bill, pinned)
    assert failure is not None
    assert failure.code is ErrorCode.CANNOT_FIT
    for word in words:
        assert word in failure.message.replace(".0 GB", " GB")


def test_ledger_shows_every_account() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60, grant=Grant(40, 5, 10, 5))
    view = ledger.view()
    assert view["free_bytes"] == 40
    assert view["accounts"]["a"]["reserved_bytes"] == 60  # type: ignore[index]
