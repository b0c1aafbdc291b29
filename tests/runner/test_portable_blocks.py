"""Pieces from arrays and back: the same arrays whatever the sizes of the engines between them."""

import dataclasses

import numpy as np
import pytest
from fake_device import make_buckets
from pools import CONVS, HISTORY, KV, StrangePages, recurrent

from jaxspec.cache import namespaced
from jaxspec.cache.portable import names
from jaxspec.parallel import Group
from jaxspec.plan.block_plan import Copied
from jaxspec.runner.blocks import BlockCopies
from jaxspec.runner.portable_blocks import PortableBlocks

TOKENS = tuple(range(100, 123))
MODEL = (KV, recurrent(), CONVS)
ATTENTION = (KV, HISTORY)


def blocks_of(specs=MODEL, page_size=4, block_pages=2, num_checkpoints=2, *, devices=1, local=None):
    shapes = make_buckets(
        page_size=page_size, block_pages=block_pages, num_checkpoints=num_checkpoints
    )
    group = Group(devices)
    return PortableBlocks(BlockCopies(local or specs, shapes, group), specs, group)


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


def shared(devices):
    """Pools of a model with 2 key-value heads and convolutions of 4, 2 and 4 channels."""
    few = max(1, 2 // devices)
    states = recurrent()
    return (
        dataclasses.replace(KV, heads=few),
        dataclasses.replace(
            states,
            conv=states.conv._replace(parts=(4 // devices, few, 4 // devices)),
            state=states.state._replace(shape=(4 // devices, 3, 4)),
        ),
        dataclasses.replace(CONVS, channels=8 // devices),
        HISTORY,
    )


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_arrays_are_those_of_the_model_on_any_number_of_devices(devices):
    whole, local, random = shared(1), shared(devices), np.random.default_rng(devices)
    shapes = {
        "kv": (23, 1, 2, 2, 4),
        "recurrent/conv": (2, 3, 10),
        "recurrent/states": (2, 4, 3, 4),
        "short_conv": (2, 2, 8),
    }
    given = {name: random.random(shape).astype(np.float32) for name, shape in shapes.items()}
    engine = blocks_of(whole, devices=devices, local=local)
    copied = engine.from_arrays(given, TOKENS)
    got = engine.to_arrays(copied)
    for name, array in given.items():
        np.testing.assert_array_equal(got[name], array)
    np.testing.assert_array_equal(got["tokens"], TOKENS)
    contents = engine._blocks.contents(copied.state)
    conv = np.split(contents.checkpoint["recurrent"].conv, devices)
    kv = np.split(contents.pages["kv"], devices)
    for rank in range(devices):
        first, count = rank * 4 // devices, 4 // devices
        few, head = max(1, 2 // devices), rank * 2 // devices
        channels = [*range(first, first + count), *range(4 + head, 4 + head + few)]
        channels += range(6 + first, 6 + first + count)
        newest = given["recurrent/conv"][:, -1, channels]
        assert any((row == newest).all() for row in np.moveaxis(conv[rank], 1, 0))
        np.testing.assert_array_equal(
            kv[rank][0, 0, :, 2], given["kv"][22, 0, :, head : head + few]
        )


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
