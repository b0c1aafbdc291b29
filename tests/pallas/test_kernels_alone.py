"""Kernels are compiled by themselves before their program is (`runner/programs/kernels.py`)."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.backend import get_compile_options
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, SingleDeviceSharding

from jaxspec.pallas.selection import LastKept
from jaxspec.pallas.selection.noise import RowKeys
from jaxspec.runner.programs.kernels import kernels_of


@pytest.mark.mosaic
def test_the_kernels_of_a_program_compile_alone(h200):
    """For an H200 that is not there."""
    from jax.sharding import AbstractDevice
    from jaxlib._jax import DeviceList

    from jaxspec.pallas.selection.best_noisy_kernel import best_noisy_kernel
    from jaxspec.pallas.selection.sums_above_kernel import sums_above_kernel

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(h200))

    def search(scores, keys, flags, last, limits):
        best = best_noisy_kernel(scores, keys, flags, last, flags)
        return best, sums_above_kernel(scores, last.logit, limits, flags, flags)

    scores, limits = array(4, 16_384), array(4, 15)
    keys, flags = RowKeys(*[array(4, dtype=jnp.uint32)] * 2), array(4, dtype=jnp.bool_)
    last = LastKept(array(4), array(4, dtype=jnp.int32))
    there = AbstractDevice(device_kind=h200.device_kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=there)):
        program = jax.jit(search).trace(scores, keys, flags, last, limits).lower()
    module = program.compiler_ir("stablehlo")
    found = kernels_of(module)
    assert len(found) == 2
    with module.context:
        for content in found.values():
            alone = ir.Module.parse(content)
            h200.client.compile(
                alone,
                executable_devices=DeviceList((h200,)),
                compile_options=get_compile_options(1, 1),
            )
