"""The sum of a group's parts, beside the kernel's order of adding them (the kernel needs GPUs)."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import parallel
from jaxspec.pallas.norm import mailbox, residual
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.pallas.norm.reduce_add_norm import settled, why_not_kernel
from jaxspec.pallas.norm.residual import OfDevices
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.parallel import Group
from jaxspec.runner.programs import XLA_OPTIONS

FEATURES = 512


def norm_of(weight):
    return Norm(weight, 1e-6, zero_centred=True)


def twin(stream, own, norm):
    """The kernel's arithmetic: float32 sums by rank, rounded as the stream, then the norm."""
    parts = own if own.ndim == 2 else functools.reduce(operator.add, own)
    of_devices = jax.lax.all_gather(parts, parallel.AXIS).astype(jnp.float32)
    new = functools.reduce(operator.add, of_devices).astype(stream.dtype)
    total = (stream.astype(jnp.float32) + new.astype(jnp.float32)).astype(stream.dtype)
    return total, norm(total)


def drawn(devices, shape, dtype):
    """Other values on each device."""
    rng = np.random.default_rng(devices)
    values = rng.normal(size=(devices * shape[0], *shape[1:]))
    return jnp.asarray(values, dtype)


@pytest.mark.devices
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, FEATURES), jnp.bfloat16), ((2, 3, FEATURES), jnp.float32)]
)
def test_a_sum_by_rank_is_that_of_an_all_reduce(devices, shape, dtype):
    group, weight = Group(devices), jnp.linspace(-1, 1, FEATURES, dtype=jnp.bfloat16)

    def both(own, stream):
        norm = norm_of(weight)
        return twin(stream, own, norm), add_norm(stream, OfDevices(own), norm)

    stream = drawn(1, (3, FEATURES), jnp.bfloat16)
    own = drawn(devices, shape, dtype)
    on_each = jax.jit(group.on_each(both, whole=1, equal=False), compiler_options=XLA_OPTIONS)
    (total, normed), plain = on_each(own, stream)
    for found, expected in zip((total, normed), plain, strict=True):
        of_ranks = np.float32(found).reshape(devices, 3, FEATURES)
        assert (of_ranks == of_ranks[:1]).all()
        if devices == 2:  # of two addends there is one order
            np.testing.assert_array_equal(np.float32(found), np.float32(expected))
        # An all-reduce of bfloat16 rounds each time that it adds.
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=0.05, atol=0.05)


@pytest.mark.devices
def test_each_output_is_summed_once():
    """By the first norm or addition that takes it; what was summed is no device's part any more."""

    def once(own, stream):
        pending = residual.reduced(residual.of_devices(own))
        again = residual.reduced(pending)
        return residual.add(stream, residual.of_devices(own)), residual.add(stream, again)

    own = jnp.arange(4, dtype=jnp.float32).reshape(4, 1)
    stream = jnp.zeros((2, 1))
    first, second = jax.jit(Group(2).on_each(once, whole=1))(own, stream)
    assert first.ravel().tolist() == second.ravel().tolist() == [2.0, 4.0, 2.0, 4.0]


def test_alone_nothing_is_of_devices():
    own = jnp.ones((2, FEATURES))
    assert residual.of_devices(own) is own
    assert settled(own, own, norm_of(jnp.ones(FEATURES))) is own


def like(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(
    ("rows", "features", "own"),
    [
        (257, 2048, like(257, 2048)),
        (1, 2688, like(1, 2688)),
        (1, 5120, like(1, 5120)),  # wider than the mailbox
        (1, 2048, like(1, 2048, dtype=jnp.float32)),
        (1, 2048, like(2, 1, 2048)),
    ],
)
def test_what_the_kernel_does_not_take(rows, features, own):
    box, norm = Mailbox(2, 4096), norm_of(like(features))
    good = like(256, 2048), OfDevices(like(256, 2048)), norm_of(like(2048))
    assert why_not_kernel(*good) is not None  # no mailbox
    with mailbox.use(box, box.like()):
        assert why_not_kernel(*good) is None
        assert why_not_kernel(like(rows, features), OfDevices(own), norm) is not None
