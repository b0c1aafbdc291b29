"""The sum of a group's parts, beside the kernel's order of adding them (the kernel needs GPUs)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_sums import sums_by_rank

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


def drawn(devices, shape, dtype):
    """Other values on each device."""
    rng = np.random.default_rng(devices)
    values = rng.normal(size=(devices * shape[0], *shape[1:]))
    return jnp.asarray(values, dtype)


@pytest.mark.devices
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("parts", [(), (2,)], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_sum_by_rank_is_that_of_an_all_reduce(devices, parts, dtype):
    """Both are the exact sum, rounded; the sum by rank has the same bits on all devices."""
    group, weight = Group(devices), jnp.linspace(-1, 1, FEATURES, dtype=dtype)

    def both(own, stream):
        norm = norm_of(weight)
        return sums_by_rank(stream, own, norm), add_norm(stream, OfDevices(own), norm)

    stream = drawn(1, (3, FEATURES), dtype)
    own = drawn(devices, (*parts, 3, FEATURES), jnp.float32 if parts else dtype)
    on_each = jax.jit(group.on_each(both, whole=1, equal=False), compiler_options=XLA_OPTIONS)
    (total, normed), plain = on_each(own, stream)
    each = np.float64(own).reshape(-1, 3, FEATURES)
    exact = np.float64(stream) + each.sum(axis=0)
    # Two roundings: of the sum, and of the stream with it. In float32 each addition is one, too.
    wide, narrow = (float(jnp.finfo(each).eps) for each in (jnp.float32, dtype))
    step = narrow * (abs(exact) + abs(each.sum(axis=0))) + len(each) * wide * abs(each).sum(axis=0)
    assert (abs(np.float64(total).reshape(devices, 3, FEATURES) - exact) <= step).all()
    loose = {"rtol": 0.05, "atol": 0.05} if dtype != jnp.float32 else {"rtol": 1e-5, "atol": 1e-5}
    for found, expected in zip((total, normed), plain, strict=True):
        of_ranks = np.float32(found).reshape(devices, 3, FEATURES)
        assert (of_ranks == of_ranks[:1]).all()
        if devices == 2:  # of two addends there is one order
            np.testing.assert_array_equal(np.float32(found), np.float32(expected))
        # An all-reduce of 16 bits rounds each time that it adds.
        np.testing.assert_allclose(np.float32(found), np.float32(expected), **loose)


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
        (1, 2720, like(1, 2720)),
        (1, 5120, like(1, 5120)),  # wider than the mailbox
        (1, 2048, like(1, 2048, dtype=jnp.float32)),
        (1, 2048, like(2, 1, 2048)),
    ],
)
def test_what_the_kernel_does_not_take(rows, features, own):
    box, norm = Mailbox(2, 4096), norm_of(like(features))
    good = [
        (like(256, size), OfDevices(like(256, size)), norm_of(like(size))) for size in (2048, 2688)
    ]
    assert all(why_not_kernel(*each) is not None for each in good)  # no mailbox
    with mailbox.use(box, box.like()):
        assert all(why_not_kernel(*each) is None for each in good)
        assert why_not_kernel(like(rows, features), OfDevices(own), norm) is not None
