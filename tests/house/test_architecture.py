"""What the layout promises: size budgets, a test for every file, one place that waits."""

import ast
import re
from pathlib import Path

import pytest

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent
TESTS = Path(__file__).parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Longer than the budget, and why it stays whole. This list may only shrink.
LONG_FILES = {"scheduler/scheduler.py": 310}
KERNEL = re.compile(r"_kernel|_block|_tiles|/gpu/")  # files that import Pallas
# Tested through others: no logic of their own, or only seen whole. This list may only shrink.
TESTED_ELSEWHERE = {
    "__main__.py": "test_main.py",
    "runner/draft_inputs.py": "runner/test_step.py",
    "runner/batch_state.py": "runner/test_remap.py",
    "runner/model_runner.py": "laws/test_laws.py",
    "runner/output.py": "laws/test_laws.py",
    "scheduler/packing.py": "support/fake_device.py",
    "scheduler/scheduled_step.py": "scheduler/test_scheduler.py",
}


def name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    budget = 500 if KERNEL.search(name(path)) else 300
    assert text.count("\n") <= LONG_FILES.get(name(path), budget)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_no_file_has_a_name_that_says_nothing():
    assert not [p for p in SOURCES if p.stem in {"utils", "util", "helpers", "common", "misc"}]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_file_has_its_tests(path):
    """Beside its name, or, for parts of a kernel and of a model, those of the op or the model."""
    if path.stem in ("__init__", "base") or "layers" in path.parts or "gpu" in path.parts:
        return
    folder = TESTS / path.parent.relative_to(PACKAGE)
    elsewhere = TESTED_ELSEWHERE.get(name(path))
    if "pallas" in path.parts and not (folder / f"test_{path.stem}.py").exists():
        assert any(folder.glob("test_*.py")), "a package of kernels has the tests of its ops"
        return
    own = folder / f"test_{path.stem}.py"
    assert own.exists() or (elsewhere and (TESTS / elsewhere).exists())


def test_pallas_is_imported_by_kernels_alone():
    """So that an op costs nobody without a GPU the import of Mosaic."""
    found = [
        name(path)
        for path in SOURCES
        if not KERNEL.search(name(path))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax.experimental")
        if "pallas" in f"{node.module} {[alias.name for alias in node.names]}"
    ]
    assert found == []


def test_no_class_of_a_kernel_derives_from_one_of_another_file():
    trees = {p: ast.parse(p.read_text()) for p in SOURCES if "pallas" in p.parts}
    classes = {
        node.name: path
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for path, tree in trees.items():
        for node in tree.body:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                owner = classes.get(ast.unparse(base).rpartition(".")[2], path)
                assert owner == path, f"{name(path)}: {node.name} derives from {name(owner)}"


def test_only_the_output_waits_for_the_device():
    """And loading, before there are any steps: until a buffer may be filled again."""
    waiting = re.compile(r"block_until_ready|device_get|\.item\(\)|np\.asarray\(self\._packed")
    found = {name(path) for path in SOURCES if waiting.search(path.read_text())}
    assert found == {"runner/output.py", "models/transfer.py"}


def test_the_environment_says_no_more_than_where_files_lie():
    found = {name(path) for path in SOURCES if "os.environ" in path.read_text()}
    assert found == {"user_folders.py"}


def test_every_kernel_has_a_name_of_its_own_in_profiles():
    """Its own, or what `launch` is called with, where kernels are made alike."""
    kernels, names = 0, []
    for path in (PACKAGE / "pallas").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else None
            if function == "plgpu.kernel":
                (name,) = (x.value for x in node.keywords if x.arg == "kernel_name")
                kernels += 1
                names += [name.value] if isinstance(name, ast.Constant) else []
            elif function in ("launch", "_launch") and isinstance(node.args[0], ast.Constant):
                names.append(node.args[0].value)
    assert len(set(names)) == len(names) >= kernels > 1
