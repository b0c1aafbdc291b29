"""The documents: figures are the measured ones, links lead somewhere, README's code runs."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [
    path
    for path in sorted([*ROOT.rglob("README.md"), *ROOT.glob("docs/*.md")])
    if not any(part.startswith(".") or part == "lib" for part in path.relative_to(ROOT).parts)
]
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|<(?:img|a|source)\b[^>]*?(?:src|href|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDS_NETWORK = "# needs the network"


@pytest.fixture
def tables(monkeypatch):
    return importlib.import_module("benchmarks.report.tables")


def test_tables_are_what_the_results_say(tables):
    shown = set()
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert tables.filled(text) == text, "Run `python -m benchmarks.report.tables`."
        shown |= {place[0] for place in tables.PLACE.findall(text)}
    assert shown == set(tables.TABLES)


def test_readme_is_for_newcomers():
    """It fits a few screens, and its figures need no commit to be understood."""
    text = README.read_text()
    assert text.count("\n") <= 130
    assert not re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", text)


def test_the_picture_beside_the_peer_has_a_pair_of_bars_for_each_case(tables, tmp_path):
    pictures = importlib.import_module("benchmarks.report.pictures")
    figures = [
        json.loads((tables.RESULTS / f"{x}_h200.json").read_text()) for x in ("decode", "peer")
    ]
    pictures.against_vllm(*figures, tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.count("<!-- 64 rows") == 2 and "vLLM" in drawn


def test_a_table_is_made_anew_and_a_wrong_place_is_refused(tables, tmp_path):
    start = {"first_character_seconds": 2.5, "seconds": 3.0, "peak_memory_mb": 900}
    figures = {"cold": start, "warm": start | {"seconds": 1.0}}
    (tmp_path / "first_command_cpu.json").write_text(json.dumps(figures))
    text = "a\n<!-- table: first command -->\nold\n<!-- end -->\nb\n"
    new = tables.filled(text, tmp_path)
    assert "| empty | 2.5 | 3.0 | 900 |\n| filled | 2.5 | 1.0 | 900 |\n<!-- end -->\nb\n" in new
    assert new.startswith("a\n") and "old" not in new
    assert tables.filled(new, tmp_path) == new
    with pytest.raises(ValueError, match="no table 'nothing'; known are against vLLM,"):
        tables.filled("<!-- table: nothing -->\n<!-- end -->\n", tmp_path)
    with pytest.raises(ValueError, match="has no `<!-- end -->`"):
        tables.filled("<!-- table: acceptance -->\n" + text, tmp_path)


def test_a_public_kernel_stands_beside_ours(tables):
    ours = {"op": "gdn_step", "dtype": "float32", "rows": 64, "width": 4, "us": 10, "of_copy": 0.9}
    beside = ours | {"reference_us": 50.0, "public_us": 19.94, "public": "package 1.0 function"}
    _, _, alone, both = tables.TABLES["kernels"]({"results": [ours, beside]}).splitlines()
    assert alone == "| `gdn_step`, float32, 64 x 4 | 10.0 | – | – | 90% |"
    assert both == "| `gdn_step`, float32, 64 x 4 | 10.0 | 50.0 | 19.9 | 90% |"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(path):
    for match in LINK.finditer(CODE.sub("", path.read_text())):
        target = (match[1] or match[2]).partition("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{match[0]} leads nowhere"


def test_the_python_in_it_runs(monkeypatch, tmp_path, short_model):
    monkeypatch.setattr("jaxspec.api.loading.EMBEDDED_MODEL", short_model)
    text = README.read_text()
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for block in BLOCK.finditer(text):
        lines_before = "\n" * text.count("\n", 0, block.start(1))  # errors name README's lines
        code = compile(lines_before + block[1], README, "exec")
        if not block[1].startswith(NEEDS_NETWORK):
            exec(code, namespace)
