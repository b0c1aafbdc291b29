"""Compiling kernels for an H200 that is not there: no spills, no copy of a pool.

A test takes the fixture `h200`; `tests/conftest.py` leaves it out where the compiler is missing.
"""

import re
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, SingleDeviceSharding

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150109880320
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
"""


def compile_for(h200, monkeypatch, step, operands, donated=()):
    """The compiled program; ptxas' report goes to stdout."""
    from jax.sharding import AbstractDevice

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    sharding = SingleDeviceSharding(h200)
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands
    )
    device = AbstractDevice(device_kind=h200.device_kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(step, donate_argnums=donated).trace(*operands).lower()
    with nothing_kept_on_disk():
        return lowered.compile()


@contextmanager
def nothing_kept_on_disk():
    """A cached program reports nothing, and one for a device that is not there cannot be read.

    JAX asks whether the cache is on once a process; only `reset_cache` makes it ask again.
    """
    was_on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_on)
        compilation_cache.reset_cache()


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "f8e4m3fn": 1, "pred": 1}


def operand_starts(program):
    """Where operands begin, in bytes, that XLA hands to kernels as parts of other arrays.

    It wraps such a kernel in a computation that slices its operands. What it copies first is not
    here.
    """
    starts = []
    for body in re.findall(r"^%dynamic-slice-fusion\S* \(.*?^}", program, re.M | re.S):
        found = re.findall(r"= (\w+)\[\S* slice\((%[\w.-]+)\).*?slice=\{(.*?)\}", body)
        for dtype, whole, ranges in found:
            (dims,) = re.findall(rf"{re.escape(whole)} = \w+\[([\d,]+)\]", body)
            start = 0
            firsts = re.findall(r"\[(\d+):", ranges)
            for size, first in zip(dims.split(","), firsts, strict=True):
                start = start * int(size) + int(first)
            starts.append(start * _BYTES[dtype])
    return starts


def array(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def assert_lean(compiled, report, pool=None, between=65536, spills=0):
    """No spills, and the donated pool or pools, if any, written in place.

    `between`: bytes that kernels may hand on to others, where there is no pool. `spills`: bytes, of
    a kernel that is faster despite them.
    """
    assert "for 'sm_90a'" in report
    stores, loads = (
        set(re.findall(rf"(\d+) bytes spill {x}", report)) for x in ("stores", "loads")
    )
    assert max(map(int, stores | loads)) <= spills
    if pool is not None:
        assert_in_place(compiled, pool)
        return
    assert not _copies(compiled)
    needed = compiled.memory_analysis().temp_size_in_bytes
    assert needed < between, (needed, between)


def assert_in_place(compiled, pool):
    """The donated pool or pools are written in place."""
    assert not _copies(compiled)
    memory = compiled.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8


def _copies(compiled):
    """Copies of arrays; a loop may copy its counter."""
    return re.findall(r"(?<!\[\] )copy(?:-start)?\(", compiled.as_text())
