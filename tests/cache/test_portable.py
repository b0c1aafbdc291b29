"""The portable form: the same arrays whatever the sizes of the engine that they come from."""

import dataclasses

import jax
import numpy as np
import pytest
from pools import CONVS, HIDDEN, HISTORY, KV, SIZES, random_like, recurrent

from jaxspec.cache import PoolSizes, Replay, allocate_checkpoints, namespaced
from jaxspec.cache.copies import read_checkpoint
from jaxspec.cache.portable import checkpoint_of, names, pages_of, state_arrays, token_arrays

SPECS = (KV, HISTORY, HIDDEN, recurrent(), CONVS, *namespaced("draft", [KV, recurrent()]))
OTHERS = (
    KV,
    HISTORY,
    HIDDEN,
    recurrent(Replay(8)),
    CONVS,
    *namespaced("draft", [KV, recurrent()]),
)
WIDER = PoolSizes(num_pages=9, page_size=3, num_slots=7, width=1)


def made_up(seed=0, num_tokens=5):
    """Arrays of a request."""
    random = np.random.default_rng(seed)
    shapes = {
        "kv": (num_tokens, 1, 2, 1, 4),
        "tokens": (num_tokens,),
        "hidden_states": (num_tokens, 8),
        "draft/kv": (num_tokens, 1, 2, 1, 4),
        "recurrent/conv": (2, 3, 5),
        "recurrent/states": (2, 2, 3, 4),
        "short_conv": (2, 2, 5),
        "draft/recurrent/conv": (2, 3, 5),
        "draft/recurrent/states": (2, 2, 3, 4),
    }
    kinds = {"tokens": np.int32}
    return {
        name: (100 * random.random(shape)).astype(kinds.get(name, np.float32))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6])
def test_tokens_are_the_same_in_pages_of_any_size(num_tokens):
    arrays = made_up(num_tokens=num_tokens)
    for sizes in (SIZES, WIDER):
        pages = pages_of(SPECS, arrays, num_tokens, sizes)
        count = -(-num_tokens // sizes.page_size)
        assert pages["kv"].shape == (count, 1, 2, sizes.page_size, 1, 4)
        assert pages["tokens"].shape == (count, sizes.page_size)
        again = token_arrays(SPECS, pages, num_tokens)
        assert again.keys() == {"kv", "tokens", "hidden_states", "draft/kv"}
        for name, array in again.items():
            np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("position", [0, 1, 2, 5, 6, 40])
def test_inputs_are_the_same_in_rings_of_any_length(position):
    """And a checkpoint has them in the rows in which a row at that position reads them."""
    arrays = made_up()
    for specs, sizes in ((SPECS, SIZES), (OTHERS, WIDER)):
        checkpoint = checkpoint_of(specs, arrays, position, sizes)
        conv = checkpoint["recurrent"].conv
        assert conv.shape == (2, 4 - 1 + sizes.width, 5)
        for ago in range(1, 4):
            row = conv[:, (position - ago) % conv.shape[1]]
            np.testing.assert_array_equal(row, arrays["recurrent/conv"][:, 3 - ago])
        again = state_arrays(specs, checkpoint, position)
        assert set(again) == {name for name in arrays if "recurrent" in name or "conv" in name}
        for name, array in again.items():
            np.testing.assert_array_equal(array, arrays[name])
        one = dataclasses.replace(sizes, num_slots=1)
        kept = allocate_checkpoints(specs, one, 1)
        wanted = jax.eval_shape(lambda kept=kept, s=specs: read_checkpoint(s, kept, np.int32(1)))
        assert jax.tree.structure(wanted) == jax.tree.structure(checkpoint)
        for want, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(checkpoint), strict=True):
            assert (want.shape, want.dtype) == (got.shape, got.dtype)


def test_a_checkpoint_of_an_engine_comes_back_where_its_next_tokens_look():
    kept = random_like(allocate_checkpoints(SPECS, SIZES, 2), 3)
    checkpoint = read_checkpoint(SPECS, kept, np.int32(2))
    arrays = state_arrays(SPECS, checkpoint, 7)
    again = checkpoint_of(SPECS, arrays, 7, SIZES)
    np.testing.assert_array_equal(again["recurrent"].states, checkpoint["recurrent"].states)
    rows = (7 - np.arange(3, 0, -1)) % (4 - 1 + SIZES.width)
    for tree in ("recurrent", "draft/recurrent"):
        np.testing.assert_array_equal(again[tree].conv[:, rows], checkpoint[tree].conv[:, rows])


def test_names_are_those_of_all_arrays():
    assert names(SPECS) == made_up().keys()
    assert names((KV,)) == {"kv"} and names(()) == set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop("kv"), "must have the array 'kv'"),
        (lambda a: a.update(kv=a["kv"][..., :2]), r"'kv' .* \[5, 1, 2, 1, 4\]"),
        (lambda a: a.update(kv=a["kv"][:4]), r"'kv' .* got float32 \[4, 1, 2, 1, 4\]"),
        (lambda a: a.update(tokens=a["tokens"].astype(np.int64)), "'tokens' .* int32"),
        (lambda a: a.pop("recurrent/states"), "must have the array 'recurrent/states'"),
        (lambda a: a.update(short_conv=a["short_conv"][:, 1:]), r"'short_conv' .* \[2, 2, 5\]"),
    ],
)
def test_arrays_of_another_model_are_refused(change, words):
    arrays = made_up()
    change(arrays)
    with pytest.raises(ValueError, match=words):
        pages_of(SPECS, arrays, 5, SIZES)
        checkpoint_of(SPECS, arrays, 5, SIZES)
