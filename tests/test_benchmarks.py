"""The benchmarks start and say what they are; nothing is measured here."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help(path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    help_text = capsys.readouterr().out
    assert end.value.code == 0
    assert "--json" in help_text or path.stem == "tables"


def test_a_record_says_where_it_was_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    record = importlib.import_module("record")
    record.write(tmp_path / "figures.json", {"seconds": 1.5})
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["seconds"] == 1.5
    assert written.keys() > {"device", "cpu", "cpu_count", "python", "jax", "jaxlib", "date"}
    record.write(None, {})
