import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import drafting

from jaxspec.models.checkpoint_module import ModelSpec


@pytest.mark.parametrize("name", ["llama_draft", "llama_eagle3", "gemma4_assistant"])
def test_a_recipe_makes_the_same_module_again(name):
    made = drafting(name)
    model_spec = ModelSpec.of(made, jnp.dtype("float32"))
    empty = jax.tree.leaves(nnx.state(model_spec.model()))
    leaves = jax.tree.leaves(nnx.state(made))
    assert [(x.shape, x.dtype) for x in empty] == [(x.shape, x.dtype) for x in leaves]
    again = model_spec.with_weights(leaves)
    assert type(again) is type(made) and again.config == made.config
    for one, other in zip(jax.tree.leaves(nnx.state(again)), leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert hash(model_spec) == hash(ModelSpec.of(made, jnp.dtype("float32")))
