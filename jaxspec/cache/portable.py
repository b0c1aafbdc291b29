"""The portable form of what an engine keeps of a request: NumPy arrays without its sizes in them.

Engines differ in page sizes, in the slots that they have, in how many drafts they verify, and in
how their states survive a verify. None of that is in the arrays:

    by token     `[tokens, ...]`: keys and values `[tokens, layers, 2, heads, head_dim]`, token ids,
                 hidden states; page i of a request has tokens `i * page_size` and following
    by slot      recurrent states `[layers, heads, value_dim, key_dim]` with the ring folded in;
                 convolution inputs `[layers, taps - 1, channels]` of the positions in front of the
                 first token that is not computed, oldest first, zeros in front of the first token

Their names are those of the specs, with the part behind a slash where a pool has several.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.cache.checkpoints import by_slot
from jaxspec.cache.copies import paged
from jaxspec.cache.specs import CacheSpec, Pools, PoolSizes

Arrays = Mapping[str, np.ndarray]


def token_arrays(
    specs: Iterable[CacheSpec], pages: Pools, num_tokens: int
) -> dict[str, np.ndarray]:
    """The first `num_tokens` tokens of a request, whose `pages` (`read_pages`) are in order."""
    arrays = {}
    for spec in paged(specs):
        for name, leaf in _named(spec.name, pages[spec.name]):
            tokens = np.moveaxis(np.asarray(leaf), 1 + spec.page_axis, 1)
            num_pages, page_size, *one = tokens.shape
            arrays[name] = tokens.reshape(num_pages * page_size, *one)[:num_tokens]
    return arrays


def pages_of(
    specs: Iterable[CacheSpec], arrays: Arrays, num_tokens: int, sizes: PoolSizes
) -> Pools:
    """The `num_tokens` tokens in pages of `sizes.page_size` tokens, as `write_pages` takes them.

    Behind the last token are zeros.

    Raises:
        ValueError: an array is missing, or is not what an engine of these specs keeps of a token.
    """
    pools = {}
    for spec in paged(specs):
        like = jax.eval_shape(lambda spec=spec: spec.allocate(sizes))

        def in_pages(name: str, leaf: Any, axis: int = spec.page_axis) -> np.ndarray:
            shape = leaf.shape[:axis] + leaf.shape[axis + 2 :]
            tokens = _checked(arrays, name, (num_tokens, *shape), leaf.dtype)
            count = -(-len(tokens) // sizes.page_size)
            padded = np.zeros((count * sizes.page_size, *shape), tokens.dtype)
            padded[: len(tokens)] = tokens
            pages = padded.reshape(count, sizes.page_size, *shape)
            return np.ascontiguousarray(np.moveaxis(pages, 1, 1 + axis))

        leaves = [in_pages(name, leaf) for name, leaf in _named(spec.name, like)]
        pools[spec.name] = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return pools


def state_arrays(
    specs: Iterable[CacheSpec], checkpoint: Pools, position: int
) -> dict[str, np.ndarray]:
    """A checkpoint (`read_checkpoint`) behind so many tokens."""
    arrays = {}
    for spec in by_slot(specs):
        for name, leaf in _named(spec.name, checkpoint[spec.name]):
            leaf, taps = np.asarray(leaf), spec.taps_of(_part(name))
            arrays[name] = leaf if taps is None else leaf[:, _rows(position, taps, leaf.shape[1])]
    return arrays


def checkpoint_of(
    specs: Iterable[CacheSpec], arrays: Arrays, position: int, sizes: PoolSizes
) -> Pools:
    """The checkpoint behind so many tokens, as `write_checkpoint` takes it.

    Raises:
        ValueError: an array is missing, or is not what an engine of these specs keeps of a state.
    """
    one, pools = dataclasses.replace(sizes, num_slots=1), {}
    for spec in by_slot(specs):
        like = jax.eval_shape(lambda spec=spec: spec.allocate_checkpoints(one))

        def kept(name: str, leaf: Any, spec: Any = spec) -> np.ndarray:
            layers, _, *shape = leaf.shape
            taps = spec.taps_of(_part(name))
            if taps is None:
                return _checked(arrays, name, (layers, *shape), leaf.dtype)
            given = _checked(arrays, name, (layers, taps - 1, *shape[1:]), leaf.dtype)
            ring = np.zeros((layers, *shape), given.dtype)
            ring[:, _rows(position, taps, shape[0])] = given
            return ring

        leaves = [kept(name, leaf) for name, leaf in _named(spec.name, like)]
        pools[spec.name] = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return pools


def _rows(position: int, taps: int, ring: int) -> np.ndarray:
    """The rows of a ring with the inputs in front of a position, oldest first (`conv_update`)."""
    return (position - np.arange(taps - 1, 0, -1)) % ring


def names(specs: Iterable[CacheSpec]) -> set[str]:
    """The names of the arrays that these specs give."""
    specs, sizes = tuple(specs), PoolSizes(num_pages=1, page_size=1, num_slots=1, width=1)
    pools = jax.eval_shape(lambda: {s.name: s.allocate(sizes) for s in paged(specs)})
    pools |= jax.eval_shape(lambda: {s.name: s.allocate_checkpoints(sizes) for s in by_slot(specs)})
    return {name for pool, tree in pools.items() for name, _ in _named(pool, tree)}


def _named(pool: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pool with their names; a pool that is one array has its own."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (pool + "".join(f"/{getattr(k, 'name', getattr(k, 'key', k))}" for k in path), leaf)
        for path, leaf in leaves
    ]


def _part(name: str) -> str:
    return name.rpartition("/")[2]


def _checked(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array of that name, if it has the shape and dtype."""
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"A kept request must have the array {name!r}, and it has {list(arrays)}.")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"The array {name!r} of a kept request must be {dtype} {list(shape)} for this engine, "
            f"got {array.dtype} {list(array.shape)}. Use the same model and dtypes on both sides."
        )
    return array
