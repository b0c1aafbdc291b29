"""Strict dtypes and ranks, exact fp32 products on a GPU too, and compiled programs kept on disk."""

import collections
import ctypes
import dataclasses
import functools
import gc
import importlib.util
import math
import os
import sys
import warnings
import weakref
import zlib
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import jax
import pytest
from pairwise import cover
from shortened import write_shortened

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.models.quantised import holding
from jaxspec.options.engine_options import EngineConfig
from jaxspec.pallas import dispatch
from jaxspec.plan.plan import AfterForwardPass, ForwardPass
from jaxspec.runner import model_runner
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.programs import program_cache
from jaxspec.runner.programs.compilation_cache import enable_compilation_cache
from jaxspec.runner.step import new_step
from jaxspec.runner.warmup import warm_up

# XLA reads these when its first program is compiled.
if jax.__version_info__ < (0, 11):  # later versions have no such flags
    twice_as_fast = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {twice_as_fast}"
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("NPROC", "1")  # XLA's threads: other cores have tests of their own
else:
    # Mosaic's interpreter runs each thread of a kernel as a program of its own. One that waits for
    # another keeps one of XLA's threads meanwhile; with too few of those they wait for ever.
    os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# For the processes of `pytest -n 2`: a second thread of OpenBLAS's spins where products are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

jax.config.update("jax_num_cpu_devices", 4)  # for groups of devices; others use the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tests run all the same where nothing can be kept
    if enable_compilation_cache() is None:
        jax.config.update("jax_enable_compilation_cache", False)
if jax.config.jax_persistent_cache_min_compile_time_secs < math.inf:  # which means: read alone
    # Ops that tests call one by one compile in tens of ms, thousands of times.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)

# The same cases each time, and nothing kept between runs. HYPOTHESIS_PROFILE=search draws others.
hypothesis.settings.register_profile("same", database=None, deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", database=None, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

GIB = 2**30
NOT_HERE = pytest.StashKey[collections.Counter]()  # why, and how many tests


def pytest_addoption(parser):
    parser.addoption("--share", default="0/1", help="K/N: part K modulo N of the test functions")


def pytest_configure(config):
    if _is_for_devices(config):
        # A sum over devices holds one of XLA's threads for each of them until the last has come.
        os.environ["NPROC"] = "8"
    config.stash[NOT_HERE] = collections.Counter()


@pytest.hookimpl(tryfirst=True)  # before pytest asks for markers
def pytest_collection_modifyitems(config, items):
    """`LONG` modules come first; tests that this machine can't run are left out and counted."""
    for item in items:
        if {"interpreter", "h200"} & set(item.fixturenames):
            item.add_marker("mosaic")
    _leave_most_to_soak(items)
    items.sort(key=lambda item: not getattr(item.module, "LONG", False))
    reasons = {item: reason for item in items if (reason := _why_not_here(item))}
    config.stash[NOT_HERE].update(reasons.values())
    config.hook.pytest_deselected(items=list(reasons))
    chosen, num_shares = map(int, config.getoption("share").split("/"))
    items[:] = [
        item
        for item in items
        if item not in reasons and _share(item, num_shares) == chosen % num_shares
    ]


def _leave_most_to_soak(items):
    """Of a function with the marker `few(n)`, mark all but n cases `soak`.

    The n have as many different values of the parameters as n cases can have.
    """
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("soak"):
            functions[item.nodeid.split("[")[0]].append(item)
    for cases in functions.values():
        [num_quick] = cases[0].get_closest_marker("few").args
        # Not `indices`, which number the cases where parametrizations are stacked.
        values = [{(name, id(x)) for name, x in case.callspec.params.items()} for case in cases]
        for index in set(range(len(cases))) - set(cover(values, num_quick)):
            cases[index].add_marker("soak")


def _share(item, num_shares):
    """All cases of a function are in one share, for they share programs."""
    return zlib.crc32(item.nodeid.split("[")[0].encode()) % num_shares


def _is_for_devices(config):
    return config.getoption("markexpr").startswith("devices")


def _why_not_here(item):
    """What a test needs that is not here, or None."""
    if item.get_closest_marker("devices") and not _is_for_devices(item.config):
        return "need several devices (`pytest -m devices`)"
    _, missing = dispatch.kernels_here()
    if missing and item.get_closest_marker("gpu"):
        return f"need a Hopper GPU with kernels ({missing})"
    if jax.__version_info__ < (0, 11) and item.get_closest_marker("mosaic"):
        return f"need jax 0.11 and Python 3.12 (this is jax {jax.__version__})"
    if "h200" in item.fixturenames and not importlib.util.find_spec("jax_cuda13_plugin"):
        return "need the compiler for GPUs (jax-cuda13-pjrt and jax-cuda13-plugin, with --no-deps)"
    return None


def pytest_sessionfinish(session):
    """A process of `pytest -n 2` tells the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not here"] = dict(session.config.stash[NOT_HERE])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every process leaves out the same tests, so one count is all of them."""
    output = getattr(node, "workeroutput", {})  # a crashed worker has none
    node.config.stash[NOT_HERE] |= collections.Counter(output.get("not here"))


def pytest_terminal_summary(terminalreporter, config):
    counts = config.stash[NOT_HERE]
    if counts:
        why = "; ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
        terminalreporter.write_line(f"Not run here: {why}.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`pytest -n 2` is `--dist worksteal`: each process takes a stretch of tests.

    Neighbours share programs. By pytest-xdist's default every process would compile nearly all.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.fixture
def holds(monkeypatch):
    """Hold what kernels multiply on a GPU, as on a GPU."""
    monkeypatch.setattr(holding, "_has_kernel", lambda matrix, form: True)


@pytest.fixture(scope="module", autouse=True)
def programs_compile_fast(request):
    """On a CPU, without most optimizations: most of the suite's time is XLA's, and this halves it.

    A module that wants them says `OPTIMIZED = True`.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    if jax.default_backend() == "cpu" and not getattr(request.module, "OPTIMIZED", False):
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session", autouse=True)
def every_program_is_traced():
    """None comes from disk, but in the tests of that: others change functions under the sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_cache, "_folder", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_compile_on_demand():
    """In the background they would take the cores of other tests; tests of that ask for it."""
    made = EngineConfig.of

    def of(model, options):
        return made(model, {"background_compilation": False} | dict(options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.api.llm_engine.EngineConfig", SimpleNamespace(of=of))
        yield


class _OnFirstRun:
    """A program of a runner that is compiled when it runs."""

    def __init__(self, runner, program):
        self._runner, self._program = weakref.proxy(runner), program

    def __call__(self, *args):
        compiled = self._runner.lower(self._program).compile()
        self._runner.install(self._program, compiled)
        return compiled(*args)


@pytest.fixture(scope="session", autouse=True)
def halves_of_steps_compile_on_demand():
    """A rung with masks brings four programs, and few tests run the two of masks by the host."""

    def warm_up_without_halves(runner, wanted, **options):
        for program in wanted:
            is_half = isinstance(program, ForwardPass | AfterForwardPass)
            if is_half and type(runner) is ModelRunner and not runner.is_warm(program):
                runner.install(program, _OnFirstRun(runner, program))
        return warm_up(runner, wanted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.runner.compiler.warm_up", warm_up_without_halves)
        patch.setattr("harness.warm_up", warm_up_without_halves)
        yield


@pytest.fixture(scope="session")
def short_model(tmp_path_factory):
    """Two of the embedded model's layers, for tests that ask neither for text nor for good drafts.

    It writes near-words; few of its drafts are accepted.
    """
    return write_shortened(EMBEDDED_MODEL, (0, 3), tmp_path_factory.mktemp("models") / "short")


def _shared_steps():
    """Return `jitted_step` with programs shared by all engines that differ in no program's text.

    The sizes of pools are those of a program's arguments, by which JAX tells its versions apart;
    which programs an engine has, and how many cached states, no step reads.
    """
    made = functools.lru_cache(256)(new_step)

    def jitted_step(config, program):
        rows = config.shapes.max_num_seqs
        unread = {"num_pages": 2, "num_checkpoints": 0, "steps_per_dispatch": 1}
        unread |= {"decode_rows": (rows,), "prefill_tokens": (1,), "draft_buckets": ()}
        shapes = dataclasses.replace(config.shapes, **unread)
        return made(dataclasses.replace(config, shapes=shapes), program)

    return jitted_step


@pytest.fixture(scope="session", autouse=True)
def programs_outlive_engines():
    """A test's engine has the programs of one that another test has left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "jitted_step", _shared_steps())
        yield


@pytest.fixture
def fresh_programs(monkeypatch):
    """Trace programs anew, for functions that are replaced, and keep those of other tests."""
    monkeypatch.setattr(model_runner, "jitted_step", _shared_steps())


@pytest.fixture
def device_with(monkeypatch):
    """The default device becomes one with so many bytes for JAX; None: it does not tell."""

    def patch(limit, in_use=0):
        stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": in_use}
        device = SimpleNamespace(platform="cpu", device_kind="fake", memory_stats=lambda: stats)
        monkeypatch.setattr("jaxspec.device.default_device", lambda: device)

    return patch


@pytest.fixture(scope="session")
def limits():
    """What the process may grow to before the next module cleans up."""
    return SimpleNamespace(resident=2 * GIB, num_maps=30_000)


@pytest.fixture(autouse=True, scope="module")
def freed_memory_goes_back(limits):
    """glibc keeps what compiling has freed in pieces: 13 GB a process, of which 4 were in use.

    Collecting takes seconds in a process with many programs, so it is for growth alone.
    """
    yield
    if sys.platform != "linux" or _resident() < limits.resident:
        return
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    limits.resident = _resident() + GIB


def _resident():
    """Bytes of the process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def programs_do_not_pile_up(limits):
    """XLA maps some dozen pieces of memory a program; beyond Linux's 65,530 a process aborts."""
    yield
    if _num_maps() > limits.num_maps:
        jax.clear_caches()  # what is needed again comes from disk
        gc.collect()
        limits.num_maps = max(30_000, _num_maps() + 5_000)  # engines may hold the others


def _num_maps():
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
