"""Which device programs run on."""

import jax

from jaxspec import device


def test_jax_says_which_device_is_the_default():
    cpu = jax.devices("cpu")[0]
    assert device.default_device() == jax.local_devices()[0]
    with jax.default_device(cpu):
        assert device.default_device() == cpu
    with jax.default_device("cpu"):
        assert device.default_device() == cpu
