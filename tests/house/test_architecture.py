"""The layout: sizes of files, tests of every package, the one place that waits."""

import ast
import re
from pathlib import Path

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent
TESTS = Path(__file__).parents[1]
SOURCES = sorted(PACKAGE.rglob("*.py"))

KERNEL = re.compile(r"_kernel|_block|_tiles|/gpu/")  # files that import Pallas


def name(path):
    return path.relative_to(PACKAGE).as_posix()


def _num_lines(function):
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return lines - (first.end_lineno - first.lineno + 1 if has_docstring else 0)


def test_files_and_functions_stay_small():
    too_long = []
    for path in SOURCES:
        text = path.read_text()
        too_long += [name(path)] if text.count("\n") > 500 else []
        too_long += [
            f"{name(path)}: {node.name}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and _num_lines(node) > 60
        ]
    assert too_long == []


def test_no_file_has_a_name_that_says_nothing():
    assert not [p for p in SOURCES if p.stem in {"utils", "util", "helpers", "common", "misc"}]


def test_every_package_has_its_tests():
    """In a folder of its name; layers are tested by their models, what kernels share by ops."""
    packages = {path.parent.relative_to(PACKAGE) for path in SOURCES}
    packages -= {Path("models/layers"), Path("pallas/gpu"), Path("server/page")}
    assert [str(p) for p in packages if not any((TESTS / p).glob("test_*.py"))] == []


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
    """And what reads weights: until a buffer may be filled again, or an array written to."""
    waiting = re.compile(r"block_until_ready|device_get|\.item\(\)|np\.asarray\(self\._packed")
    found = {name(path) for path in SOURCES if waiting.search(path.read_text())}
    of_weights = {"models/transfer.py", "models/trees/leaves.py", "models/trees/checkpoint.py"}
    of_weights.add("runner/memory.py")
    assert found == {"runner/output.py", "pallas/norm/mailbox.py"} | of_weights


def test_few_files_read_the_environment():
    """For places of files, devices of replicas, and XLA's flags, which nodes compare."""
    found = {name(path) for path in SOURCES if "os.environ" in path.read_text()}
    assert found == {"files.py", "api/processes/devices.py", "api/nodes.py"}


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
