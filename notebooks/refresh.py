"""Runs the notebooks from a clean kernel and keeps their outputs and pictures.

    python notebooks/refresh.py [quickstart.ipynb ...]

Each cell with the tag "picture" becomes pictures/<its id>.png, which documents show. A test runs
the notebooks the same way without writing; the outputs of cells with the tag "exact" must not
change.
"""

import argparse
import base64
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
_COMPILED = re.compile(r"(jaxspec: compiling [^\n]*\n)*")
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def run(name: str) -> nbformat.NotebookNode:
    """The notebook after a run from a clean kernel; raises `CellExecutionError` if a cell does."""
    client = NotebookClient(
        nbformat.read(FOLDER / name, as_version=4),
        timeout=600,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return without_compile_lines(client.execute())


def without_compile_lines(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what says that programs compiled, which takes another time each run."""
    for cell in notebook.cells:
        told = [output for output in cell.get("outputs", ()) if output.get("name") == "stderr"]
        # A line comes in two outputs, where some time passes before its end.
        if _COMPILED.fullmatch("".join(output.text for output in told)):
            for output in told:
                cell.outputs.remove(output)
    return notebook


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NOTEBOOKS, metavar="NOTEBOOK")
    for name in parser.parse_args().names:
        notebook = run(name)
        nbformat.write(notebook, FOLDER / name)
        for picture, png in pictures(notebook).items():
            (FOLDER / "pictures" / f"{picture}.png").write_bytes(png)


if __name__ == "__main__":
    main()
