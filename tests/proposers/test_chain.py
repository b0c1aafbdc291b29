from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.proposers.chain import Chain, ids_at, over_all_ids
from jaxspec.requests.sampling_features import GREEDY, SAMPLED
from jaxspec.sampling import SamplingInputs

IDS = jnp.asarray([2, 3, 7], jnp.int32)


def test_an_index_becomes_its_id_and_none_stays_none():
    np.testing.assert_array_equal(ids_at(jnp.asarray([2, -1, 0]), IDS), [7, -1, 2])


def test_what_is_never_drafted_has_no_probability():
    scores = over_all_ids(jnp.asarray([[0.5, -1.0, 2.0]]), IDS, 9)
    none = -np.inf
    expected = [[none, none, 0.5, -1.0, none, none, none, 2.0, none]]
    np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize(("probabilistic", "features"), [(False, SAMPLED), (True, GREEDY)])
def test_scores_are_made_only_where_tokens_are_drawn(probabilistic, features):
    rows = jnp.arange(3, dtype=jnp.int32)
    inputs = SimpleNamespace(
        slots=rows, num_computed=rows, should_draft=rows != 1, num_drafts=2, features=features
    )
    chain = Chain(inputs, probabilistic, 9, IDS)
    for given in ([0, 1, -1], [2, 2, 0]):
        token = chain.add(lambda forbidden, given=given: jnp.asarray(given), None)
    np.testing.assert_array_equal(token, [7, 7, 2])
    drafts = chain.drafts()
    np.testing.assert_array_equal(drafts.tokens, [[2, 7], [3, 7], [-1, 2]])
    np.testing.assert_array_equal(drafts.num_drafts, [2, 0, 2])
    assert drafts.logits is None


@pytest.mark.soak
def test_what_drafts_were_drawn_from_comes_along():
    rows = jnp.arange(2, dtype=jnp.int32)
    columns = {"seed": rows, "stop_ids": rows[:, None] * 0 - 1, "min_len": rows * 0}
    columns["temperature"] = jnp.full(2, 0.8, jnp.float32)
    inputs = SimpleNamespace(
        slots=rows, num_computed=rows, should_draft=rows >= 0, num_drafts=1, features=SAMPLED,
        sampling=SamplingInputs(columns),
    )  # fmt: skip
    chain = Chain(inputs, True, 9, IDS)
    token = chain.add(None, lambda: jnp.asarray([[0.0, 90.0, 0.0], [0.0, 0.0, 90.0]]))
    np.testing.assert_array_equal(token, [3, 7])
    assert chain.drafts().logits.shape == (2, 1, 9)
