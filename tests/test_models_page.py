"""`docs/models.md` is true: its families, what is said of each, and that its figures are within what tests allow."""

from tests import models_page
from tests.worker.models.test_oracle_families import TOLERANCE
from worker.jobs.gguf import TYPES
from worker.models import FAMILIES


def test_the_table_is_that_of_the_code_and_its_figures_are_within_bounds() -> None:
    text = models_page.PAGE.read_text(encoding="utf-8")
    figures = models_page.listed(text)
    assert list(figures) == list(models_page.families()), "run `python -m tests.models_page`"
    assert text == models_page.updated(text, models_page.parts(figures)), "run `python -m tests.models_page`"
    assert all(0 < float(figure) < TOLERANCE for figure in figures.values())


def test_every_model_type_is_in_one_row_and_every_case_is_named() -> None:
    rows = models_page.rows(dict.fromkeys(models_page.families(), "1e-6"))[2:]
    for model_type in FAMILIES:
        assert sum(f"`{model_type}`" in row.split("|")[2] for row in rows) == 1
    for name in models_page.checkpoints.names():
        assert any(f" {name}" in row.split("|")[3].replace(",", " ") for row in rows)


def test_every_tensor_type_that_is_read_is_named() -> None:
    text = models_page.PAGE.read_text(encoding="utf-8")
    assert [kind.name for kind in TYPES.values() if kind.name not in text] == []


def test_a_figure_is_measured() -> None:
    """One case, anew: it is a number, and no greater than what is written of its family, but for the machine."""
    figures = models_page.listed(models_page.PAGE.read_text(encoding="utf-8"))
    assert 0 < models_page.difference("qwen3") < 10 * float(figures["qwen3"])
