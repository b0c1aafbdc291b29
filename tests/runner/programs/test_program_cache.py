"""Programs on disk: a later process traces nothing, gives the same, and takes nothing stale."""

import gc
import json
import logging
import os
import stat
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Harness, prompts

from jaxspec.pallas import dispatch
from jaxspec.parallel import Group
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.programs import program_cache, program_key
from jaxspec.runner.programs.program_cache import kept, place

real_folder = program_cache._folder
FIRST = Program(4, 0, GREEDY)
FEW = {"decode_rows": (4,), "prefill_tokens": (16,), "steps_per_dispatch": 2}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where programs are kept for this test."""
    folder = tmp_path / "cache" / "programs"
    monkeypatch.setattr(program_cache, "_folder", lambda: folder)
    forget(monkeypatch)
    return folder


def forget(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(program_cache, "_calls", weakref.WeakValueDictionary())
    monkeypatch.setattr(program_cache, "_handed", {})
    monkeypatch.setattr(dispatch, "_chosen", {})


class Counted:
    """`{"x": x}, y -> {"x": x + 1}, sum(x) + y`, the latter on the host; and how often traced."""

    def __init__(self):
        self.count = 0
        self.jitted = jax.jit(self.step, donate_argnums=0)

    def step(self, state, y):
        self.count += 1
        dispatch.runs_kernel("add", None, rows=1)
        total = jax.device_put(state["x"].sum() + y, jax.memory.Space.Host)
        return {"x": state["x"] + 1}, total

    def kept(self, closed_over="add", size=4):
        args = {"x": jnp.arange(size)}, np.int32(2)
        results = jax.tree.structure(({"x": 0}, 0))
        file = place(self.jitted, args, closed_over)
        return kept(file, self.jitted, args, results, {"donate_argnums": 0})


@pytest.fixture
def counted():
    return Counted()


def files(folder):
    return sorted(file.name for file in folder.rglob("*"))


def run(devices=1):
    """The tokens of two requests to a model with drafts."""
    engine = Harness(drafts=1, group=Group(devices), **FEW)
    for prompt in prompts(2):
        engine.add(prompt)
    engine.run()
    return [list(request.output) for request in engine.requests]


SMALL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU has two processes then
LATER = """
import json, sys
from pathlib import Path
import conftest, jax, test_program_cache as here
from jaxspec.pallas import dispatch
from jaxspec.runner.programs import program_cache, program_key
jax.config.update("jax_disable_most_optimizations", json.loads(sys.argv[2]))
program_cache._folder = lambda: Path(sys.argv[1])
program_cache.traced = None
print(json.dumps([here.run(int(sys.argv[3])), dispatch.implementations()]))
"""


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.devices)])
def test_a_later_process_traces_no_step_and_gives_the_same_tokens(devices, folder):
    """One program is a loop; and states are copied for samples of one prompt."""
    tokens = run(devices)
    names = files(folder)
    steps = "step_4_0_1_greedy-", "step_4_0_1_greedy_2_times", "step_4_16_1_greedy"
    starts = "moves", *steps, "tables"
    assert [name.startswith(start) for name, start in zip(names, starts, strict=True)] == [True] * 5
    config = json.dumps(jax.config.read("jax_disable_most_optimizations"))
    here = Path(__file__).parent  # which has a conftest of its own
    path = os.pathsep.join([str(here.parents[1]), *sys.path, str(here)])
    later = subprocess.run(
        [sys.executable, "-c", LATER, str(folder), config, str(devices)],
        env={**os.environ, **SMALL, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    chosen = {op: list(kinds) for op, kinds in dispatch.implementations().items()}
    assert json.loads(later.splitlines()[-1]) == [tokens, chosen]
    assert files(folder) == names


def test_what_is_kept_does_the_same_in_the_memory_it_is_given(folder, counted, monkeypatch):
    for _ in range(2):
        forget(monkeypatch)
        state = {"x": jnp.arange(4)}
        compiled = counted.kept().lower(state, np.int32(2)).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == state["x"].nbytes
        assert "HloModule jit_step," in compiled.as_text()
        after, total = compiled(state, np.int32(2))
        assert state["x"].is_deleted()
        assert (after["x"].tolist(), int(total)) == ([1, 2, 3, 4], 8)
        assert total.sharding.memory_kind == "pinned_host"
    assert counted.count == 1


def test_a_program_is_read_once_for_all_who_hold_it(folder, counted):
    first = counted.kept()
    assert counted.kept() is first
    others = [counted.kept(other) for other in "bc"]
    assert len(program_cache._calls) == 3 and len(set(others)) == 2
    del first, others
    gc.collect()
    assert not program_cache._calls
    counted.kept()
    assert counted.count == 3  # from the folder


def test_what_ops_run_as_is_known_of_programs_that_others_traced(
    folder, counted, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, dispatch.__name__)
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (False, "this is a test"))
    said = []
    for _ in range(2):
        forget(monkeypatch)
        caplog.clear()
        counted.kept()
        assert dispatch.implementations() == {"add": ("XLA: this is a test",)}
        said.append(caplog.messages)
    assert said == [["add runs as XLA: this is a test"]] * 2
    counted.kept("traced after the op was known")
    forget(monkeypatch)
    counted.kept("traced after the op was known")
    assert dispatch.implementations() == {"add": ("XLA: this is a test",)}
    assert counted.count == 2


@pytest.mark.parametrize(("missing", "imports"), [(None, 1), ("this is a test", 0)])
def test_what_kernels_need_is_imported_where_none_is_traced(
    folder, counted, monkeypatch, missing, imports
):
    """Mosaic's module sets the environment that XLA finds its runtime by."""
    monkeypatch.setattr(dispatch, "kernels_here", lambda: (True, missing))
    imported = []
    monkeypatch.setattr(program_cache, "import_module", imported.append)
    counted.kept()
    forget(monkeypatch)
    imported.clear()
    counted.kept()
    assert imported == ["jax.experimental.pallas.mosaic_gpu"] * imports
    assert counted.count == 1


@pytest.mark.parametrize(
    "broken", [b"", b"junk", lambda data: data[:-1], lambda data: b"\0" + data]
)
def test_a_broken_file_is_written_anew(folder, counted, monkeypatch, broken):
    counted.kept()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(broken if isinstance(broken, bytes) else broken(whole))
    for _ in range(2):
        forget(monkeypatch)
        counted.kept()
    assert counted.count == 2
    assert file.read_bytes()[32:].partition(b"\n")[0] == whole[32:].partition(b"\n")[0]
    assert files(folder) == [file.name]


def content_of(counted, size=4):
    """What another process would make of it."""
    return program_cache.traced(counted.jitted, ({"x": jnp.arange(size)}, np.int32(2)), "cpu")


@pytest.mark.parametrize("is_full", [False, True])
def test_what_another_process_traced_is_called_written_or_not(
    is_full, folder, counted, monkeypatch
):
    content = content_of(counted)
    file = place(counted.jitted, ({"x": jnp.arange(4)}, np.int32(2)), "add")
    if is_full:

        def write(path, content):
            raise OSError("no space left on the device")

        monkeypatch.setattr(program_cache, "write_own", write)
    program_cache.hand_over(file, content)
    assert program_cache.is_there(file) is not is_full
    call = counted.kept()
    assert total(call) == 8 and counted.count == 1
    assert program_cache.is_there(file) and not program_cache._handed


@pytest.mark.parametrize("is_junk", [True, False])
def test_an_answer_that_is_no_such_program_is_traced_anew_and_overwritten(
    is_junk, folder, counted, monkeypatch
):
    """Junk, or a program of other arguments."""
    file = place(counted.jitted, ({"x": jnp.arange(4)}, np.int32(2)), "add")
    program_cache.hand_over(file, b"noise" if is_junk else content_of(counted, size=5))
    counted.count = 0
    for _ in range(2):
        assert total(counted.kept()) == 8 and counted.count == 1
        forget(monkeypatch)


def test_a_folder_that_nobody_can_write_is_no_error(folder, counted):
    folder.parent.write_text("a file")
    function = counted.kept()
    assert int(function({"x": jnp.arange(4)}, np.int32(2))[1]) == 8
    assert folder.parent.is_file()


def planted(folder, counted, monkeypatch):
    """Another program under the name of `counted`'s, whole and with its digest: others made it."""

    def step(state, y):
        return {"x": state["x"] * 0}, y - y

    jitted, counted.jitted = counted.jitted, jax.jit(step, donate_argnums=0)
    counted.kept()
    counted.jitted = jitted
    forget(monkeypatch)
    (file,) = folder.iterdir()
    return file


def total(function):
    return int(function({"x": jnp.arange(4)}, np.int32(2))[1])


def test_a_program_in_its_place_is_taken_for_it(folder, counted, monkeypatch):
    """What the tests below plant would work."""
    planted(folder, counted, monkeypatch)
    assert total(counted.kept()) == 0 == counted.count


def test_a_program_that_others_could_write_is_traced_anew(folder, counted, monkeypatch):
    file = planted(folder, counted, monkeypatch)
    file.chmod(0o666)
    assert total(counted.kept()) == 8 and counted.count == 1
    forget(monkeypatch)
    assert total(counted.kept()) == 8 and counted.count == 1  # from the file made anew
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("place", [".", ".."])
def test_a_program_in_a_folder_that_others_could_write_is_not_used(
    place, folder, counted, monkeypatch
):
    file = planted(folder, counted, monkeypatch)
    before = file.read_bytes()
    (folder / place).resolve().chmod(0o775)
    assert counted.kept() is counted.jitted
    assert file.read_bytes() == before


def test_a_link_in_a_programs_place_is_replaced(folder, counted, monkeypatch, tmp_path):
    file = planted(folder, counted, monkeypatch)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert total(counted.kept()) == 8 and counted.count == 1
    assert not file.is_symlink()


def test_files_used_last_stay(folder, counted, monkeypatch):
    for day, name in enumerate("abc"):
        before = set(folder.glob("*"))
        counted.kept(name)
        (file,) = set(folder.glob("*")) - before
        os.utime(file, (day, day))
    forget(monkeypatch)
    counted.kept("a")  # is read, and with that the newest
    monkeypatch.setattr(program_cache, "_MAX_BYTES", 2.5 * file.stat().st_size)
    counted.kept("d")
    forget(monkeypatch)
    counted.count = 0
    for name, count in {"a": 0, "d": 0, "b": 1}.items():
        counted.kept(name)
        assert counted.count == count


def test_no_program_is_kept_where_jax_keeps_none(counted, monkeypatch, tmp_path):
    """Nor in a cache that is no folder."""
    monkeypatch.setattr(program_cache, "_folder", real_folder)
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    cases = [(None, True), (str(tmp_path), False), ("gs://bucket/programs", True)]
    try:
        for folder, enabled in cases:
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_enable_compilation_cache", enabled)
            assert counted.kept() is counted.jitted
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert real_folder() == tmp_path / "jaxspec-programs"
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_enable_compilation_cache", before[1])
    assert files(tmp_path) == []


def test_what_no_key_tells_from_others_is_not_kept(folder, counted, caplog):
    """Code that is not the package's, and things that only this process can name."""
    caplog.set_level(logging.INFO, program_key.__name__)
    for unknown in (Counted, files, object(), {1}, lambda: None):
        assert counted.kept(("a", [unknown])) is counted.jitted
        assert "a program is not kept" in caplog.text
        caplog.clear()
    assert files(folder) == []


def test_a_program_that_jax_does_not_export_is_compiled_all_the_same(folder, caplog):
    caplog.set_level(logging.INFO, program_cache.__name__)

    def step(x):
        jax.debug.print("{}", x.sum())
        return x + 1

    jitted, args = jax.jit(step, donate_argnums=0), (jnp.arange(4),)
    file = place(jitted, args, "print")
    assert kept(file, jitted, args, jax.tree.structure(0), {}) is jitted
    assert "a program is not kept" in caplog.text and files(folder) == []


def test_sources_edited_while_a_process_runs_are_not_taken_for_those_it_runs(
    folder, counted, monkeypatch
):
    monkeypatch.setattr(program_key, "SOURCES", "what they were")
    counted.kept()
    assert files(folder) == [] and counted.count == 1
