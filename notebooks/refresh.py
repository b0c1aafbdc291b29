"""Runs quickstart.ipynb from a clean kernel and keeps its outputs and its pictures.

    python notebooks/refresh.py

Each cell with the tag "picture" becomes pictures/<its id>.png, which README shows. A test runs the
notebook the same way without writing; the outputs of cells with the tag "exact" must not change.
"""

import base64
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NOTEBOOK = FOLDER / "quickstart.ipynb"


def run() -> nbformat.NotebookNode:
    """The notebook after a run from a clean kernel; raises `CellExecutionError` if a cell does."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return client.execute()


def pictures(notebook: nbformat.NotebookNode) -> dict[str, bytes]:
    """PNG of each cell with the tag "picture", by the cell's id."""
    return {
        cell.id: base64.b64decode(output.data["image/png"])
        for cell in notebook.cells
        if "picture" in cell.metadata.get("tags", ())
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    }


def main() -> None:
    """Run, then write the notebook and its pictures."""
    notebook = run()
    for name, png in pictures(notebook).items():
        (FOLDER / "pictures" / f"{name}.png").write_bytes(png)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
