"""Weights drawn at random on the device: a model's speed without its checkpoint."""

import jax

from jaxspec.models.published import Published


def draw_weights(model: Published) -> None:
    """Give the model's parameters values as before training.

    The device itself draws them one after the other, the same each time: it needs room for hardly
    more than the weights, and nothing passes through the host.
    """
    params = {id(placement.param): placement.param for placement in model.checkpoint()}
    key = jax.random.key(0)
    for number, param in enumerate(params.values()):
        draw = jax.jit(param.get_metadata("init"), static_argnums=(1, 2))
        param.set_value(draw(jax.random.fold_in(key, number), param.shape, param.dtype))
