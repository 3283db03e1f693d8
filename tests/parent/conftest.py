"""The data folder that commands see, and one small model in it."""

import os
from pathlib import Path

import pytest

from tests.parent.models import write_model


@pytest.fixture
def data() -> Path:
    """The data folder that every command of the test sees."""
    return Path(os.environ["MLXD_DATA_DIR"])


@pytest.fixture
def tiny(data: Path) -> Path:
    return write_model(data / "models" / "org" / "tiny", card={"aliases": ["t"], "origin": "a test"})
