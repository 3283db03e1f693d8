"""Servers that several files ask."""

from collections.abc import Iterator

import pytest

from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import Served


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model_dir = write_case("llama_tied", tmp_path_factory.mktemp("real") / "tiny")
    with serving(model_dir, tmp_path_factory.mktemp("served")) as server:
        server.wait_state("ready")
        yield server
