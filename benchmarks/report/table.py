"""Markdown tables described by data: columns with a name and a format, and rows of values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

NOT_MEASURED = "Not measured yet."
MISSING = "–"  # the cell of a value that a row lacks
COMMIT = "commit", "{commit}"
Figures = dict[str, Any]
Column = tuple[str, str]


def results(*files: Figures) -> Iterable[Figures]:
    """Yield the results of all files that have no error, each with the `size` of its model."""
    for case in (case for file in files for case in file["results"]):
        if "error" not in case:
            size = {"size": size_of(case["shape"])} if "shape" in case else {}
            yield case | size


def size_of(shape: str) -> str:
    return shape.removeprefix("qwen3.5-").upper()


def plural(count: int, word: str) -> str:
    return f"{count} {word}" + "s" * (count > 1)


def spread(name: str, form: str) -> str:
    """Return the format of a median with the least and the most of its repeats."""
    return f"{{{name}:{form}}} ({{{name}_least:{form}}} to {{{name}_most:{form}}})"


class Table:
    """The first column is aligned to the left, the others to the right.

    Args:
        files: in benchmarks/results; a pattern stands for all files that match.
        rows: a function of the files' contents.
        columns: names, and formats of a row's values ("{us:.1f}").
        columns_of: columns as a function of the files' contents, instead.
        empty: the text if no result has a row.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        rows: Callable[..., Iterable[Figures]],
        *columns: Column,
        columns_of: Callable[..., Sequence[Column]] | None = None,
        empty: str = NOT_MEASURED,
    ):
        self.files = [files] if isinstance(files, str) else files
        self._rows, self._empty = rows, empty
        self._columns = columns_of or (lambda *_: columns)

    def __call__(self, *contents: Figures) -> str:
        """Return the table of the files' contents in Markdown."""
        rows = [{k: v for k, v in row.items() if v is not None} for row in self._rows(*contents)]
        if not rows:
            return self._empty if any(file.get("results") for file in contents) else NOT_MEASURED
        names, formats = zip(*self._columns(*contents), strict=True)
        rule = ["---"] + ["--:"] * (len(names) - 1)
        lines = [[_cell(form, row) for form in formats] for row in rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in (names, rule, *lines))


def _cell(form: str, row: Figures) -> str:
    try:
        return form.format_map(row)
    except LookupError:
        return MISSING
