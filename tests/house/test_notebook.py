"""The quickstart runs from a clean kernel, and the outputs it is stored with are those it gives."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

LONG = True  # begun last, it would run alone
FOLDER = Path(__file__).parents[2] / "notebooks"


def load_refresh():
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.soak
def test_the_quickstart_runs_from_a_clean_kernel(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as the suite compiles: conftest.py
    refresh = load_refresh()
    stored = nbformat.read(refresh.NOTEBOOK, as_version=4)
    fresh = refresh.run()  # raises where a cell does
    pictures = refresh.pictures(fresh)
    assert set(pictures) == {"acceptance", "speculation", "timeline", "memory"}
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
