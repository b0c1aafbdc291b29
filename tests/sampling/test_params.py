import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import SamplingInputs
from jaxspec.sampling.tables import SamplingTables


def make_inputs(rows: int, stops: int) -> SamplingInputs:
    index = jnp.arange(rows, dtype=jnp.int32)
    return SamplingInputs(
        {
            "temperature": index.astype(jnp.float32),
            "top_k": index + 10,
            "top_p": 1.0 / (index + 1).astype(jnp.float32),
            "seed": index + 20,
            "stop_ids": jnp.arange(rows * stops, dtype=jnp.int32).reshape(rows, stops),
            "min_len": index + 30,
        }
    )


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("stops", [0, 2])
def test_repeat_is_the_order_in_which_rows_of_positions_flatten(n, stops):
    inputs = make_inputs(4, stops)
    repeated = inputs.repeat(n)
    for name in inputs.columns:
        leaf, got = np.asarray(getattr(inputs, name)), np.asarray(getattr(repeated, name))
        wide = np.broadcast_to(leaf[:, None], (4, n, *leaf.shape[1:]))
        np.testing.assert_array_equal(got, wide.reshape(4 * n, *leaf.shape[1:]))


def test_a_place_has_the_tokens_in_front_of_it_and_hides_those_behind():
    tables = SamplingTables()
    inputs = SamplingInputs({}, tables, jnp.array([[4, 5, 6], [7, -1, -1]], jnp.int32))
    repeated = inputs.repeat(3)
    assert repeated.tokens.tolist() == [
        *([4, -1, -1], [4, 5, -1], [4, 5, 6]),
        *([7, -1, -1], [7, -1, -1], [7, -1, -1]),
    ]
    assert inputs.repeat(2).tokens.tolist() == [[4, -1, -1], [4, 5, -1], *[[7, -1, -1]] * 2]
    assert repeated.tables is tables  # by slot: nothing to repeat


def test_only_a_temperature_too_small_to_divide_by_is_greedy():
    temperature = [0.0, 1e-6, 1e-4, 1.0]
    columns = make_inputs(4, 0).columns | {"temperature": jnp.array(temperature, jnp.float32)}
    is_greedy = SamplingInputs(columns).is_greedy.tolist()
    assert is_greedy == [True, True, False, False]
    # The host, which chooses the program, says the same.
    assert [not SamplingParams(temperature=x).features.draws for x in temperature] == is_greedy


def test_a_column_that_is_no_sampling_field_is_refused():
    with pytest.raises(
        AttributeError, match="'mirostat' is no field of jaxspec.plan.row.SAMPLING_FIELDS"
    ):
        _ = make_inputs(1, 0).mirostat
