"""Notebooks run from a clean kernel, and the outputs they are stored with are those they give."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

from benchmarks.measure import real_model

LONG = True  # begun last, it would run alone
FOLDER = Path(__file__).parents[2] / "notebooks"


def load_refresh():
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


PICTURES = {
    "drafters.ipynb": {"methods"},
    "grpo.ipynb": {"grpo"},
    "quickstart.ipynb": {"acceptance", "speculation", "timeline", "memory"},
    "prefix.ipynb": {"first_token"},
    "real_model.ipynb": {"real_text"},
}


def test_the_notebook_of_a_real_model_takes_the_file_that_the_benchmarks_take():
    """It stands alone, so it repeats what file is meant."""
    (cell,) = (c for c in nbformat.read(FOLDER / "real_model.ipynb", 4).cells if c.id == "fetch")
    for value in (real_model.PACKAGE, real_model.NAME, real_model.SHA256):
        assert f'"{value}"' in cell.source


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_a_notebook_runs_from_a_clean_kernel(name, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as the suite compiles: conftest.py
    if name == "real_model.ipynb":
        try:
            real_model.smollm2()
        except ConnectionError as error:
            pytest.skip(str(error))
    refresh = load_refresh()
    stored = nbformat.read(FOLDER / name, as_version=4)
    fresh = refresh.run(name)  # raises where a cell does
    pictures = refresh.pictures(fresh)
    assert set(pictures) == PICTURES[name]
    for name, png in pictures.items():
        assert len(png) > 5000, name
    for name, png in refresh.pictures(stored).items():  # made together, by refresh.py
        assert (FOLDER / "pictures" / f"{name}.png").read_bytes() == png
    for cell, before in zip(fresh.cells, stored.cells, strict=True):
        assert "stderr" not in {output.get("name") for output in cell.get("outputs", [])}
        if cell.cell_type == "code":
            assert before.outputs or not cell.outputs, f"{cell.id} is stored without its output"
        if "exact" in cell.metadata.get("tags", ()):
            assert printed(cell) == printed(before), f"{cell.id}: run notebooks/refresh.py"
