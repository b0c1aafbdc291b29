"""Linear and LMHead multiply with their own weight; padding and published tensors of Linear."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers.linear import Linear, LinearOfTwo, LMHead
from jaxspec.models.layers.norm import RMSNorm
from jaxspec.pallas.norm.gated_norm import GatedNorm

RANDOM = np.random.default_rng(0)
FLOAT32 = jnp.dtype(jnp.float32)


def normal(*dims):
    return jnp.asarray(RANDOM.normal(size=dims), jnp.float32)


def linear(features, columns):
    layer = Linear(features, {"proj": columns}, FLOAT32)
    layer.weight.array.set_value(normal(features, columns))
    return layer


@pytest.fixture
def head():
    head = LMHead(8, 20, FLOAT32)
    head.weight.set_value(normal(8, 20))
    return head


def test_outputs_lie_side_by_side_before_the_padding():
    layer = Linear(8, {"a": 3, "b": 2}, FLOAT32, multiple=4)
    assert layer.weight.shape == (8, 8)
    weight, x = np.array(normal(8, 8)), normal(2, 8)
    weight[:, 5:] = np.nan
    layer.weight.array.set_value(jnp.asarray(weight))
    for part, columns in zip(layer(x), (slice(0, 3), slice(3, 5)), strict=True):
        np.testing.assert_allclose(part, x @ weight[:, columns], rtol=1e-5)
    placements = {p.name: (p.shape, p.index) for p in layer.checkpoint("m.")}
    assert placements == {
        "m.a.weight": ((3, 8), (slice(0, 8), slice(0, 3))),
        "m.b.weight": ((2, 8), (slice(0, 8), slice(3, 5))),
    }


def test_outputs_that_are_aligned_have_padding_between():
    """A joined tensor has none."""
    layer = Linear(8, {"a": 3, "b": 2, "c": 4}, FLOAT32, align=4, multiple=8, joined_name="abc")
    assert layer.weight.shape == (8, 16) and layer.starts == (0, 4, 8)
    weight, x = np.full((8, 16), np.nan, np.float32), normal(2, 8)
    columns = slice(0, 3), slice(4, 6), slice(8, 12)
    for some in columns:
        weight[:, some] = normal(8, some.stop - some.start)
    layer.weight.array.set_value(jnp.asarray(weight))
    for part, some in zip(layer(x), columns, strict=True):
        np.testing.assert_allclose(part, x @ weight[:, some], rtol=1e-5, atol=1e-6)
    places = list(layer.checkpoint("m."))
    assert [place.index for place in places] == [(slice(0, 8), some) for some in columns]
    joined = [other for place in places for other in place.instead()]
    assert [(p.shape, p.part) for p in joined] == [
        ((9, 8), slice(0, 3)),
        ((9, 8), slice(3, 5)),
        ((9, 8), slice(5, 9)),
    ]


def test_outputs_may_be_published_as_one_tensor():
    layer = Linear(8, {"a": 3, "b": 2}, FLOAT32, joined_name="ab")
    apart = list(layer.checkpoint("m."))
    assert [place.name for place in apart] == ["m.a.weight", "m.b.weight"]
    joined = [other for place in apart for other in place.instead()]
    assert [(p.name, p.shape, p.part) for p in joined] == [
        ("m.ab.weight", (5, 8), slice(0, 3)),
        ("m.ab.weight", (5, 8), slice(3, 5)),
    ]
    assert [p.index for p in joined] == [p.index for p in apart]


def test_two_inputs_side_by_side_have_their_matrices_one_below_the_other():
    layer = LinearOfTwo({"a": 3, "b": 2}, 8, FLOAT32)
    assert layer.operand.array.shape == (5, 8)
    placements = {p.name: (p.shape, p.index) for p in layer.checkpoint("m.")}
    assert placements == {
        "m.a.weight": ((8, 3), (slice(0, 3), ...)),
        "m.b.weight": ((8, 2), (slice(3, 5), ...)),
    }


def test_the_output_after_a_norm_is_of_the_normed_sum():
    layer, stream, pending = linear(8, 5), normal(3, 8), normal(3, 8)
    norm = RMSNorm(8, 1e-6, FLOAT32, zero_centred=True)
    norm.weight.set_value(normal(8))
    total, output = layer.after_norm(stream, pending, norm)
    np.testing.assert_allclose(total, stream + pending, rtol=1e-5, atol=1e-6)
    (expected,) = layer(norm(stream + pending))
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_what_is_pending_is_the_output():
    layer, x = linear(8, 5), normal(3, 8)
    np.testing.assert_allclose(layer.pending(x), layer(x)[0], rtol=1e-5, atol=1e-6)


def test_the_output_after_a_gated_norm_is_of_the_gated_heads():
    layer, heads = linear(8, 5), normal(3, 2, 4)
    norm = GatedNorm(normal(3, 9), normal(4), first=1, eps=1e-6)
    expected = layer(norm(heads))[0]
    np.testing.assert_allclose(layer.after_gated_norm(heads, norm), expected, rtol=1e-5, atol=1e-6)


def test_columns_of_the_head_give_the_scores_of_their_ids(head):
    hidden, ids = normal(3, 8), jnp.asarray([7, 2, 19])
    columns = head.columns(ids)
    scores = head(hidden)[:, ids]
    np.testing.assert_allclose(head(hidden, columns), scores, rtol=1e-5, atol=1e-6)
    nothing = jnp.zeros((3, 0), jnp.int32)
    indices = head.greedy_tokens(hidden, nothing, columns)
    np.testing.assert_array_equal(indices, scores.argmax(axis=1))


def test_a_greedy_token_is_never_a_forbidden_one(head):
    hidden = normal(3, 8)
    first = head.greedy_tokens(hidden, jnp.full((3, 1), -1, jnp.int32))
    np.testing.assert_array_equal(first, head(hidden).argmax(axis=1))
    second = head.greedy_tokens(hidden, first[:, None])
    scores = np.array(head(hidden))
    np.put_along_axis(scores, np.asarray(first)[:, None], -np.inf, axis=1)
    np.testing.assert_array_equal(second, scores.argmax(axis=1))


def test_embeddings_are_columns_of_the_head(head):
    embedded = head.embed(jnp.asarray([3, 99, -1]))  # ids out of range are clamped
    np.testing.assert_array_equal(embedded, head.weight[...][:, jnp.asarray([3, 19, 0])].T)
