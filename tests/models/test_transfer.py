"""Many blocks at once to the device: the same values on every way, little memory, clean ends."""

import gc
import os
import signal
import threading
import time
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from threads import ctrl_c_after

from jaxspec.models import transfer
from jaxspec.models.blocks import Source
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.transfer import to_device

RANDOM = np.random.default_rng(0)
BLOCK = 4096  # bytes


class Files:
    """Tensors of random numbers in place of a checkpoint; `each` is called before a read."""

    def __init__(self, dtype=np.float32, each=lambda: None):
        self.tensors, self.dtype, self.each = {}, np.dtype(dtype), each
        self.changed = False

    def source(self, shape, *parts, dtype=np.float32):
        """A parameter, put together from tensors of given shape, transposition and index."""
        param, placements = types.SimpleNamespace(shape=shape, dtype=np.dtype(dtype)), []
        for tensor, transpose, index in parts:
            name = str(len(self.tensors))
            self.tensors[name] = RANDOM.normal(size=tensor).astype(self.dtype)
            placements.append(Placement(name, tensor, param, transpose, index))
        return Source.of(placements, lambda name: name, lambda _: self.dtype)

    def read(self, name, first, into):
        self.each()
        into[...] = self.tensors[name].reshape(-1)[first : first + into.size]

    def check_unchanged(self):
        if self.changed:
            raise ValueError("it was changed")


@pytest.fixture(autouse=True)
def blocks_are_small(monkeypatch):
    """And there are processors for several threads."""
    monkeypatch.setattr(transfer, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(transfer, "SMALL_BYTES", 256)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


@pytest.fixture(params=["on the host", "on the device"])
def way(request, monkeypatch):
    """How parameters that are not small are put together."""
    if request.param == "on the device":
        monkeypatch.setattr(transfer, "_by_host", lambda source: source.num_bytes <= 256)
    return request.param


@pytest.fixture
def nothing_stays():
    """No thread and no array of JAX is left that was not there before."""
    gc.collect()
    threads = set(threading.enumerate())  # of engines that other tests share, too
    arrays = len(jax.live_arrays())
    yield
    new = set(threading.enumerate()) - threads
    assert not [t.name for t in new if t.name.startswith("jaxspec-")]
    assert len(jax.live_arrays()) <= arrays


MATRICES = [
    ((60, 100), ((100, 60), True, ...)),  # a transposed matrix
    ((60, 120), ((70, 60), True, (..., slice(70))), ((40, 60), True, (..., slice(75, 115)))),
    ((200, 30), ((200, 30), False, ...)),
    ((9, 16, 30), ((7, 16, 30), False, slice(7)), ((16, 30), False, 8)),  # a stack with a gap
    ((3, 70, 30), ((3, 70, 30), False, ...)),  # whose matrices are larger than a block
    ((5, 8), ((5,), False, (..., 2))),  # a small one
    ((2000,), ((2000,), False, ...)),
]


@pytest.mark.parametrize("stored", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_values_are_those_that_numpy_writes(way, stored, dtype):
    files, sources, expected = Files(stored), [], []
    for shape, *parts in MATRICES:
        value, first = np.zeros(shape, dtype), len(files.tensors)
        sources.append(files.source(shape, *parts, dtype=dtype))
        for number, (_, transpose, index) in enumerate(parts):
            tensor = files.tensors[str(first + number)]
            value[index] = tensor.T if transpose else tensor
        expected.append(value)
    values = to_device(sources, files, lambda count: None)
    for value, wanted in zip(values, expected, strict=True):
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, wanted)


def test_equal_layers_share_their_programs(way):
    transfer._compiled.cache_clear()
    files = Files()
    sources = [files.source(shape, *parts) for _ in range(5) for shape, *parts in MATRICES[:4]]
    to_device(sources, files, lambda count: None)
    assert transfer._compiled.cache_info().misses == (4 if way == "on the device" else 0)


def test_every_byte_is_reported_once(way):
    files, counts = Files(), []
    sources = [files.source(shape, *parts) for shape, *parts in MATRICES]
    to_device(sources, files, counts.append)
    assert sum(counts) == sum(source.num_bytes for source in sources)
    assert max(counts) <= BLOCK


def test_the_host_holds_blocks_and_no_parameter(monkeypatch):
    """NumPy tells tracemalloc of its memory, and XLA does not."""
    monkeypatch.setattr(transfer, "_by_host", lambda source: False)
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 2**16)
    files = Files(jnp.bfloat16)
    sources = [files.source((512, 8192), ((8192, 512), True, ...)) for _ in range(2)]
    to_device(sources, files, lambda count: None)  # what is compiled or cached is there
    tracemalloc.start()
    try:
        to_device(sources, files, lambda count: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20  # two buffers for each of four threads, and what Python needs
    assert sources[0].num_bytes == 2**23


def test_several_threads_read_at_once(way):
    meeting = threading.Barrier(2)
    files = Files(each=lambda: meeting.wait(20))
    to_device([files.source((64, 64), ((64, 64), False, ...))], files, lambda count: None)
    assert not meeting.broken


def failing_after(count):
    """A function whose later calls fail."""
    calls = iter(range(count))

    def each():
        if next(calls, None) is None:
            raise ValueError("it was cut short")

    return each


@pytest.mark.few(3)
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_an_error_in_one_thread_ends_all_and_leaves_nothing(way, count, nothing_stays):
    files = Files(each=failing_after(count))
    sources = [files.source(shape, *parts) for shape, *parts in MATRICES]
    with pytest.raises(ValueError, match="it was cut short"):
        to_device(sources, files, lambda count: None)


def test_a_change_that_is_found_at_the_end_leaves_nothing(way, nothing_stays):
    files = Files()
    files.changed = True
    with pytest.raises(ValueError, match="it was changed"):
        to_device([files.source((64, 64), ((64, 64), True, ...))], files, lambda count: None)


@pytest.mark.few(1)
def test_ctrl_c_ends_all_threads_and_leaves_nothing(way, nothing_stays):
    files = Files(each=lambda: time.sleep(0.05))
    sources = [files.source((256, 256), ((256, 256), True, ...)) for _ in range(20)]
    with ctrl_c_after(0.5, heard_within=5):
        to_device(sources, files, lambda count: None)


@pytest.mark.few(1)
def test_ctrl_c_again_while_a_block_is_read_changes_nothing(way, nothing_stays):
    """Whoever called does not go on before the block is whole."""
    main, begun, ended = threading.main_thread().ident, [], []

    def slowly():
        begun.append(None)
        if len(begun) == 1:
            for seconds in (0.8, 0.2):
                time.sleep(seconds)
                signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        ended.append(None)

    files = Files(each=slowly)
    sources = [files.source((256, 256), ((256, 256), True, ...)) for _ in range(20)]
    with ctrl_c_after(0.5, heard_within=5):
        try:
            to_device(sources, files, lambda count: None)
        finally:
            counts = len(begun), len(ended)
    assert counts[0] == counts[1] > 1


def test_values_go_to_the_device_that_the_caller_chose(way):
    """Threads do not inherit the choice."""
    seen = []
    files = Files(each=lambda: seen.append(jax.config.jax_default_device))
    with jax.default_device(jax.devices()[0]):
        to_device([files.source((64, 64), ((64, 64), True, ...))], files, lambda count: None)
    assert set(seen) == {jax.devices()[0]}
