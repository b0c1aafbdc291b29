import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import SamplingInputs


def make_inputs(rows: int, stops: int) -> SamplingInputs:
    index = jnp.arange(rows, dtype=jnp.int32)
    return SamplingInputs(
        temperature=index.astype(jnp.float32),
        top_k=index + 10,
        top_p=1.0 / (index + 1).astype(jnp.float32),
        seeds=index + 20,
        stop_ids=jnp.arange(rows * stops, dtype=jnp.int32).reshape(rows, stops),
        min_len=index + 30,
    )


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("stops", [0, 2])
def test_repeat_is_the_order_in_which_rows_of_positions_flatten(n, stops):
    inputs = make_inputs(4, stops)
    repeated = inputs.repeat(n)
    for name in SamplingInputs.__dataclass_fields__:
        leaf, got = np.asarray(getattr(inputs, name)), np.asarray(getattr(repeated, name))
        wide = np.broadcast_to(leaf[:, None], (4, n, *leaf.shape[1:]))
        np.testing.assert_array_equal(got, wide.reshape(4 * n, *leaf.shape[1:]))


def test_only_a_temperature_too_small_to_divide_by_is_greedy():
    temperature = jnp.array([0.0, 1e-6, 1e-4, 1.0], jnp.float32)
    inputs = make_inputs(4, 0).replace(temperature=temperature)
    np.testing.assert_array_equal(inputs.is_greedy, [True, True, False, False])
