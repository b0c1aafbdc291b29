"""Weights drawn at random on the device: a model's speed without its checkpoint."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import Model
from jaxspec.models.config import ModelConfig


def dummy_weights(family: type[Model], config: ModelConfig, dtype: jnp.dtype) -> Model:
    """A model of the `family` as `config` describes it, with weights as before training.

    The device itself draws them one after the other, the same each time: it needs room for hardly
    more than the weights, and nothing passes through the host.
    """
    model = nnx.eval_shape(lambda: family(config, dtype))
    params = {id(placement.param): placement.param for placement in model.checkpoint()}
    key = jax.random.key(0)
    for number, param in enumerate(params.values()):
        draw = jax.jit(param.get_metadata("init"), static_argnums=(1, 2))
        param.set_value(draw(jax.random.fold_in(key, number), param.shape, param.dtype))
    return model
