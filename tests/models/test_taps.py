"""A tap is the residual stream before a layer, as running the layers by hand has it there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import load_model
from jaxspec.models.layers.mixer import LayerInputs


def layer_by_layer(model, inputs, pools):
    """The stream before each layer and behind the last, and what the norm makes of that."""
    layer_inputs, seen = LayerInputs.of(inputs, model.config.rope), []
    stream = model.embed(inputs.tokens)
    for layer in model.trunk.layers:
        seen.append(stream)
        stream, pending, pools = layer(stream, None, layer_inputs, pools)
        stream = stream + pending
    return [*seen, stream], model.trunk.norm(stream)


@pytest.fixture(params=["qwen3", "qwen3_5"])
def step(request, fixture_folder, single_request):
    """A model, and the inputs and pools of a step with a prompt in it."""
    model = load_model(fixture_folder(request.param), jnp.float32)
    driver = single_request(model)
    inputs, _ = driver._inputs(np.arange(7), 7, prefill=True)
    return model, inputs, driver.pools


@pytest.mark.soak
@pytest.mark.few(1)
def test_taps_are_the_stream_before_each_layer(step):
    model, inputs, pools = step
    seen, hidden = layer_by_layer(model, inputs, pools)
    end = len(model.trunk.layers)
    output, after = model.forward(inputs, pools, taps=(2, end, 0, 1))
    np.testing.assert_allclose(output.hidden, hidden, atol=1e-5)
    wanted = jnp.concatenate([seen[2], seen[end], seen[0], seen[1]], axis=1)
    np.testing.assert_allclose(output.aux_hidden, wanted, atol=1e-5)
    plain, untapped = model.forward(inputs, pools)
    assert plain.aux_hidden is None
    np.testing.assert_array_equal(plain.hidden, output.hidden)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(untapped), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_tap_that_is_no_layer_is_refused(step):
    model, inputs, pools = step
    end = len(model.trunk.layers)
    with pytest.raises(ValueError, match=f"or {end} behind the last one, got \\[{end + 1}, -1\\]"):
        model.forward(inputs, pools, taps=(0, end, end + 1, -1))
