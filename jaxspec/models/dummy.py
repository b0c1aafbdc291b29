"""Random weights drawn on the device, to measure a model's speed without its checkpoint."""

import jax

from jaxspec.models.checkpoint_module import CheckpointModule


def draw_weights(model: CheckpointModule) -> None:
    """Initialise the parameters as before training, the same way every time.

    The device draws one parameter after the other, so it needs little more memory than the weights,
    and nothing is copied from the host.
    """
    params = {id(placement.param): placement.param for placement in model.checkpoint()}
    key = jax.random.key(0)
    for number, param in enumerate(params.values()):
        draw = jax.jit(param.get_metadata("init"), static_argnums=(1, 2))
        param.set_value(draw(jax.random.fold_in(key, number), param.shape, param.dtype))
