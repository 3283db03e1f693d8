"""Every feature of every protocol, asked by its official SDK: `tests/conformance/table.py`.

Of the tiny checkpoint always, of the starter model where real models are run; OpenAI's package for Node too.
"""

from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from tests.conformance import node_part
from tests.conformance.asking import Server
from tests.conformance.dialects import DIALECTS
from tests.conformance.features import NotHere
from tests.conformance.served import write_tiny
from tests.conformance.table import MATRIX, begun, cells, markdown
from tests.e2e.real import serving
from tests.process.harness import Served

CELLS = list(cells())
IDS = [f"{feature}, {column}" for feature, column in CELLS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model_dir = write_tiny(tmp_path_factory.mktemp("real") / "tiny")
    with serving(model_dir, tmp_path_factory.mktemp("served")) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture(scope="module")
def asked_tiny(tiny: Served) -> Iterator[Server]:
    server = Server(tiny.url)
    yield server
    server.close()


@pytest.mark.parametrize(("feature", "column"), CELLS, ids=IDS)
def test_conformance_of_the_tiny_checkpoint(asked_tiny: Server, feature: str, column: str) -> None:
    MATRIX[feature][column](asked_tiny, DIALECTS[column])


@pytest.fixture(scope="module")
def asked_starter(
    starter_model, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[tuple[str, str], Future[None]]]:
    """What is asked in this run, all begun here."""
    chosen = [
        (item.callspec.params["feature"], item.callspec.params["column"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == STARTER
    ]
    with serving(starter_model.path, tmp_path_factory.mktemp("starter")) as running:
        running.wait_state("ready")
        server = Server(running.url)
        assert not server.thinks
        asked = begun(server, chosen)
        yield asked
        for each in asked.values():  # of a run that breaks off
            each.cancel()
        wait(asked.values())
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "column"), CELLS, ids=IDS)
def test_conformance_of_the_starter(
    asked_starter: dict[tuple[str, str], Future[None]], feature: str, column: str
) -> None:
    try:
        asked_starter[feature, column].result()
    except NotHere:
        assert feature.startswith("thinking")  # the starter does not; the tiny checkpoint does


STARTER = test_conformance_of_the_starter.__name__


def test_conformance_of_openais_package_for_node(tiny: Served) -> None:
    try:
        told = node_part.ask(tiny.url, "tiny")
    except node_part.NoRegistry as reason:
        pytest.skip(f"OpenAI's package for Node cannot be fetched: {reason}")
    assert len(told) == 10
    assert {name: said for name, said in told.items() if said} == {}


def test_conformance_matrix_has_a_cell_for_every_feature_and_protocol() -> None:
    rows = markdown(lambda feature, column: "yes").splitlines()
    assert len(rows) == len(MATRIX) + 2
    assert {row.count("|") for row in rows} == {len(DIALECTS) + 2}
    assert sum(row.count(" yes ") for row in rows) == len(CELLS)
