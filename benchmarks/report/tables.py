"""Writes the tables of figures in the documents from the files in benchmarks/results.

    python -m benchmarks.report.tables [--check] [DOCUMENT ...]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, each on a line of its own.
`--check` changes nothing and exits with 1 if a table differs from its files. A new table is an
entry of the `TABLES` of one of the modules imported here.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.report import engine_tables, load_tables, model_tables, rollout_tables
from benchmarks.report.table import NOT_MEASURED, Figures, Table

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
_DOCS = (
    "measurements",
    "prefix-caching",
    "quantised",
    "rollouts",
    "sampling",
    "serving",
    "speculation",
    "structured-output",
    "tensor-parallel",
    "traffic",
)
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS)]
_MODULES = load_tables, model_tables, engine_tables, rollout_tables
TABLES: dict[str, Table] = {
    name: each for module in _MODULES for name, each in module.TABLES.items()
}
PLACE = re.compile(r"<!-- table: (.*?) -->\n((?:(?!<!--).)*)<!-- end -->", re.DOTALL)


def shown(figures: Figures, *names: str) -> str:
    """Return those of the named tables that `figures` has rows for, with a blank line between."""
    made = (TABLES[name](figures) for name in names)
    return "\n\n".join(table for table in made if table != NOT_MEASURED)


def filled(text: str, results: Path = RESULTS) -> str:
    """Return `text` with every table made anew.

    Raises:
        ValueError: a table without its end, an unknown name, or no file for a table.
    """
    if len(PLACE.findall(text)) != text.count("<!-- table:"):
        raise ValueError("A line `<!-- table: NAME -->` has no `<!-- end -->` after its table.")

    def fill(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"There is no table {name!r}; known are {', '.join(TABLES)}.")
        contents = []
        for file in TABLES[name].files:
            found = sorted(results.glob(file))
            if not found:
                raise ValueError(
                    f"Table {name!r} needs {results / file}: run its benchmark with --json."
                )
            contents += [json.loads(each.read_text()) for each in found]
        return f"<!-- table: {name} -->\n{TABLES[name](*contents)}\n<!-- end -->"

    return PLACE.sub(fill, text)


def main() -> None:
    """Write the tables of every document, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS, metavar="DOCUMENT")
    args = parser.parse_args()
    for document in args.documents:
        text = document.read_text()
        try:
            new = filled(text)
        except ValueError as error:
            sys.exit(f"{document}: {error}")
        if new != text and args.check:
            sys.exit(
                f"{document}: a table is not what {RESULTS} says. Run "
                "`python -m benchmarks.report.tables` to write it."
            )
        if new != text:
            document.write_text(new)


if __name__ == "__main__":
    main()
