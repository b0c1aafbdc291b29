"""A layer with the values of a checkpoint's tensors, put together in NumPy as placements say."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.layers.weight_matrix import Holder


def filled(layer, tensors, prefix=""):
    """The layer, whose parameters have what `tensors`, of canonical names, hold; all are used."""
    values = {id(p.param): (p.param, np.zeros(p.param.shape, np.float64)) for p in _all(layer)}
    used = set()
    for asked in layer.checkpoint(prefix):
        for place in [asked] if asked.name in tensors else asked.instead():
            _, value = values[id(place.param)]
            tensor = np.asarray(tensors[place.name], np.float64)
            assert tensor.shape == place.shape, place.name
            part = tensor[place.part].T if place.transpose else tensor[place.part]
            value[place.index] = part.reshape(value[place.index].shape)
            used.add(place.name)
    assert used == set(tensors)
    for param, value in values.values():
        array = param.array if isinstance(param, Holder) else param
        array.set_value(jnp.asarray(value, param.dtype))
    return layer


def _all(layer):
    return [*layer.checkpoint("")]
