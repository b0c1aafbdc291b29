"""The portable form of a request's pools: NumPy arrays independent of the engine's sizes.

Engines differ in page size, number of slots, number of drafts, state policy and number of devices.
None of these affects the arrays, which are those of the whole model:

    by token     `[tokens, ...]`: keys and values `[tokens, layers, 2, heads, head_dim]`, token ids,
                 hidden states; page i of a request contains tokens from `i * page_size` on
    by slot      recurrent states `[layers, heads, value_dim, key_dim]` with the ring folded in;
                 convolution inputs `[layers, taps - 1, channels]` of the positions before the
                 first token that is not computed, oldest first, zeros before the first token

The names are those of the specs, with the part after a slash if a pool has several arrays.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache.checkpoints import BySlot, by_slot
from jaxspec.cache.copies import paged
from jaxspec.cache.specs import CacheSpec, Pools, PoolSizes
from jaxspec.parallel import held

Arrays = Mapping[str, np.ndarray]


def token_arrays(
    specs: Iterable[CacheSpec], pages: Pools, num_tokens: int
) -> dict[str, np.ndarray]:
    """Return the arrays by token of a request's first `num_tokens` tokens.

    Args:
        specs: Specs of the engine that computed the tokens.
        pages: Copies of the request's pages in order, as returned by `read_pages`.
        num_tokens: Number of tokens; the last page may contain more rows.
    """
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
    """Return the tokens in pages of `sizes.page_size` tokens, as `copies` of `write_pages`.

    The rows after the last token are zeros.

    Raises:
        ValueError: an array is missing, or its shape or dtype differs from that of these specs.
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
    """Return the arrays by slot of a checkpoint (`read_checkpoint`).

    `position` is the length of the checkpoint's prefix.
    """
    arrays = {}
    for spec in by_slot(specs):
        for name, leaf in _named(spec.name, checkpoint[spec.name]):
            leaf, taps = np.asarray(leaf), spec.taps_of(_part(name))
            arrays[name] = leaf if taps is None else leaf[:, _rows(position, taps, leaf.shape[1])]
    return arrays


def checkpoint_of(
    specs: Iterable[CacheSpec], arrays: Arrays, position: int, sizes: PoolSizes
) -> Pools:
    """Return the checkpoint of the first `position` tokens, as `copies` of `write_checkpoint`.

    Raises:
        ValueError: an array is missing, or its shape or dtype differs from that of these specs.
    """
    one, pools = dataclasses.replace(sizes, num_slots=1), {}
    for spec in by_slot(specs):
        like = jax.eval_shape(lambda spec=spec: spec.allocate_checkpoints(one))

        def as_stored(name: str, leaf: Any, spec: BySlot = spec) -> np.ndarray:
            layers, _, *shape = leaf.shape
            taps = spec.taps_of(_part(name))
            if taps is None:
                return _checked(arrays, name, (layers, *shape), leaf.dtype)
            given = _checked(arrays, name, (layers, taps - 1, *shape[1:]), leaf.dtype)
            ring = np.zeros((layers, *shape), given.dtype)
            ring[:, _rows(position, taps, shape[0])] = given
            return ring

        leaves = [as_stored(name, leaf) for name, leaf in _named(spec.name, like)]
        pools[spec.name] = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return pools


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """The parts of an array that the devices of a group hold."""

    devices: int
    axis: int | None = None  # axis that they share; None if each device holds the whole array
    size: int = 0  # of the whole array along the axis
    held: tuple[np.ndarray, ...] = ()  # indices along the axis that each device holds

    def parts(self, whole: np.ndarray) -> list[np.ndarray]:
        """Return the part of each device."""
        if self.axis is None:
            return [whole] * self.devices
        return [np.take(whole, indices, self.axis) for indices in self.held]

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the whole array; of what several devices hold, one of their equal copies."""
        if self.axis is None:
            return parts[0]
        shape, before = list(parts[0].shape), (slice(None),) * self.axis
        shape[self.axis] = self.size
        whole = np.empty(shape, parts[0].dtype)
        for indices, part in zip(self.held, parts, strict=True):
            whole[*before, indices] = part
        return whole


def cuts(
    whole: Iterable[CacheSpec],
    local: Iterable[CacheSpec],
    of_all: Pools,
    of_one: Pools,
    devices: int,
) -> Pools:
    """Return the `Cut` of each array of the pools.

    Args:
        whole: Specs of the model, as on a single device.
        local: Specs with the sizes of one of the devices, in the same order.
        of_all: Shapes of copied pages or of a checkpoint, with the sizes of `whole`.
        of_one: The same with the sizes of `local`.
        devices: Number of devices.
    """
    specs = {a.name: (a, b) for a, b in zip(whole, local, strict=True)}
    found = {}
    for name, tree in of_all.items():
        leaves, own = _named(name, tree), jax.tree.leaves(of_one[name])
        of_pool = [
            _cut(specs[name], _part(full), (leaf.shape, other.shape), devices)
            for (full, leaf), other in zip(leaves, own, strict=True)
        ]
        found[name] = jax.tree.unflatten(jax.tree.structure(tree), of_pool)
    return found


def _cut(
    specs: tuple[CacheSpec, CacheSpec],
    part: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    devices: int,
) -> Cut:
    """Return the cut of one array, given the specs and shapes of all devices and of one."""
    shared = [axis for axis, (size, own) in enumerate(zip(*shapes, strict=True)) if size != own]
    if not shared:
        return Cut(devices)
    (axis,) = shared
    is_last = axis == len(shapes[0]) - 1
    whole, local = (
        (is_last and spec.segments_of(part)) or (shape[axis],)
        for spec, shape in zip(specs, shapes, strict=True)
    )
    indices = (held(whole, local, rank, devices) for rank in range(devices))
    return Cut(devices, axis, shapes[0][axis], tuple(indices))


def _rows(position: int, taps: int, ring: int) -> np.ndarray:
    """Return the rows of a ring with the inputs before a position, oldest first (`conv_update`).

    With 4 taps and a ring of 6 rows, the inputs before position 8 are in rows 5, 0 and 1.
    """
    return (position - np.arange(taps - 1, 0, -1)) % ring


def names(specs: Iterable[CacheSpec]) -> set[str]:
    """Return the names of all arrays in the portable form of these specs."""
    specs, sizes = tuple(specs), PoolSizes(num_pages=1, page_size=1, num_slots=1, width=1)
    pools = jax.eval_shape(lambda: {s.name: s.allocate(sizes) for s in paged(specs)})
    pools |= jax.eval_shape(lambda: {s.name: s.allocate_checkpoints(sizes) for s in by_slot(specs)})
    return {name for pool, tree in pools.items() for name, _ in _named(pool, tree)}


def _named(pool: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a pool with their names; a pool of one array has the pool's name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (pool + "".join(f"/{getattr(k, 'name', getattr(k, 'key', k))}" for k in path), leaf)
        for path, leaf in leaves
    ]


def _part(name: str) -> str:
    return name.rpartition("/")[2]


def _checked(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise ValueError(f"An exported request must have the array {name!r}, got {list(arrays)}.")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"The array {name!r} of an exported request must be {dtype} {list(shape)} for this "
            f"engine, got {array.dtype} {list(array.shape)}. Use the same model and dtypes on both "
            "sides."
        )
    return array
