"""Pieces from arrays and back: the same arrays whatever the sizes of the engines between them."""

import numpy as np
import pytest
from fake_device import make_buckets
from pools import CONVS, HISTORY, KV, StrangePages, recurrent

from jaxspec.cache import namespaced
from jaxspec.cache.portable import names
from jaxspec.plan.block_plan import Copied
from jaxspec.runner.blocks import BlockCopies

TOKENS = tuple(range(100, 123))
MODEL = (KV, recurrent(), CONVS)
ATTENTION = (KV, HISTORY)


def blocks_of(specs=MODEL, page_size=4, block_pages=2, num_checkpoints=2):
    shapes = make_buckets(
        page_size=page_size, block_pages=block_pages, num_checkpoints=num_checkpoints
    )
    return BlockCopies(specs, shapes)


def made_up(num_tokens):
    """What an engine with these specs would have computed."""
    random = np.random.default_rng(num_tokens)
    shapes = {
        "kv": (num_tokens, 1, 2, 1, 4),
        "recurrent/conv": (2, 3, 5),
        "recurrent/states": (2, 2, 3, 4),
        "short_conv": (2, 2, 5),
    }
    return {name: random.random(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 16, 23])
def test_arrays_go_through_engines_of_any_sizes_unchanged(num_tokens):
    arrays = given = made_up(num_tokens)
    for sizes in ({}, {"page_size": 3, "block_pages": 1}, {"page_size": 8, "block_pages": 5}):
        engine = blocks_of(**sizes)
        copied = engine.from_arrays(arrays, TOKENS[:num_tokens])
        full = num_tokens // engine._shapes.page_size
        assert copied.num_tokens == num_tokens and copied.state.is_state
        assert len(copied.pages) == -(-full // engine._shapes.block_pages)
        arrays = engine.to_arrays(copied)
        assert arrays.keys() == given.keys() == names(MODEL)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, given[name])


def test_nothing_computed_is_no_array():
    assert blocks_of().to_arrays(Copied(0)) == {}


def test_without_states_there_are_pages_alone():
    engine = blocks_of(ATTENTION, num_checkpoints=0)
    kv = made_up(8)["kv"]
    copied = engine.from_arrays({"kv": kv}, TOKENS[:8])
    assert copied.state is None and len(copied.pages) == 1
    got = engine.to_arrays(copied)
    np.testing.assert_array_equal(got["kv"], kv)
    np.testing.assert_array_equal(got["tokens"], TOKENS[:8])  # they need not be brought


def test_what_is_missing_makes_all_of_it_useless():
    """As where the sender had no such drafter, or nobody knows how to copy a pool."""
    arrays = made_up(5)
    for name in arrays:
        rest = {key: array for key, array in arrays.items() if key != name}
        assert blocks_of().from_arrays(rest, TOKENS[:5]) is None
    assert blocks_of((*MODEL, *namespaced("draft", [KV]))).from_arrays(arrays, TOKENS[:5]) is None
    strange = StrangePages("mine", 1)
    assert blocks_of((KV, strange), num_checkpoints=0).from_arrays(arrays, TOKENS[:4]) is None
    more = arrays | {"draft/kv": arrays["kv"]}
    assert blocks_of().from_arrays(more, TOKENS[:5]).num_tokens == 5  # what it has no use for


def test_an_array_of_another_model_is_refused():
    arrays = made_up(5)
    for name, array in arrays.items():
        with pytest.raises(ValueError, match=f"array '{name}' of an exported request must be"):
            blocks_of().from_arrays(arrays | {name: array[:-1]}, TOKENS[:5])
        with pytest.raises(ValueError, match="got float64"):
            blocks_of().from_arrays(arrays | {name: array.astype(np.float64)}, TOKENS[:5])
