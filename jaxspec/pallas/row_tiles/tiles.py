"""Functions of rows, computed in tiles of a fixed number of rows: for deterministic engines.

XLA's and our own matmuls choose the order of a row's sums by the number of rows. In a tile of one
size, inside a loop that XLA compiles by itself, a row has one order, whatever rows are beside it.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec import device

_T = TypeVar("_T")
_ROWS = {"cpu": 8}  # by platform
_OTHER_ROWS = 64  # GPUs read weights in the time that they multiply as many rows

_in_tiles = contextvars.ContextVar[bool]("in_tiles", default=False)


@contextlib.contextmanager
def deterministic(is_on: bool = True) -> Iterator[None]:
    """Compute `by_rows` in tiles in functions that are traced inside the context.

    Args:
        is_on: False for a part inside of another context that needs no fixed bits.
    """
    token = _in_tiles.set(is_on)
    try:
        yield
    finally:
        _in_tiles.reset(token)


def is_deterministic() -> bool:
    """Return whether the function is traced inside `deterministic()`."""
    return _in_tiles.get()


def by_rows(function: Callable[..., _T], *rows: Any) -> _T:
    """Return `function(*rows)`; inside `deterministic()`, computed tile by tile.

    Each row of the results depends on the same row of the arguments alone. Both are pytrees of
    arrays `[rows, ...]`.
    """
    num_rows = len(jax.tree.leaves(rows)[0])
    if not is_deterministic() or not num_rows:
        return function(*rows)
    # XLA would inline a loop that runs once, and fuse its body with what surrounds it.
    live = lax.optimization_barrier(jnp.int32(num_rows))
    results, _ = carry_over_tiles(
        lambda tile, _: (function(*tile), ()),
        rows,
        (),
        size=_ROWS.get(device.default_device().platform, _OTHER_ROWS),
        live=live,
    )
    return results


def carry_over_tiles(
    function: Callable[[Any, Any], tuple[_T, Any]],
    rows: Any,
    carried: Any,
    *,
    size: int,
    live: Int[Array, ""],
) -> tuple[_T, Any]:
    """Return the results of `function(tile, carried)` for tiles of `size` rows.

    The function returns its results, which have a row for each row of the tile, and the new
    `carried`; the last one is returned, too. Tiles without any of the first `live` rows are not
    computed; their results are zeros.
    """
    num_rows = len(jax.tree.leaves(rows)[0])
    count = (live + size - 1) // size
    # One tile too many: if there were only one, XLA would move its work out of the loop.
    wanted = (-(-num_rows // size) + 1) * size
    padded = jax.tree.map(functools.partial(_padded, wanted=wanted), rows)

    def taken(index):
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index * size, size), padded)
        return lax.optimization_barrier(tile)

    def put(index, whole, tile):
        return lax.dynamic_update_slice_in_dim(whole, tile, index * size, 0)

    def body(index, state):
        results, carried = state
        new, carried = function(taken(index), carried)
        new = lax.optimization_barrier(new)
        return jax.tree.map(functools.partial(put, index), results, new), carried

    kinds, _ = jax.eval_shape(lambda carried: function(taken(0), carried), carried)
    empty = jax.tree.map(lambda x: jnp.zeros((wanted, *x.shape[1:]), x.dtype), kinds)
    results, carried = lax.fori_loop(0, count, body, (empty, carried))
    return jax.tree.map(lambda x: x[:num_rows], results), carried


def _padded(x: Array, wanted: int) -> Array:
    return jnp.pad(x, ((0, wanted - len(x)), *((0, 0),) * (x.ndim - 1)))
