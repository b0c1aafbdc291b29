"""Choose between the kernel and the reference of an op, and record the choice.

The choice is made while an op is traced, for the default device. Leaving it to the lowering
(`jax.lax.platform_dependent`) would trace both forms of every op, even where this JAX cannot trace
the kernel, and would not report which of them ran.
"""

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec import device

_log = logging.getLogger(__name__)
_MEASURED = 0, 11  # JAX version on which the kernels were measured
_chosen: dict[str, list[str]] = {}  # implementations by op, in the order of their first choice
_heard: list[tuple[str, str, int]] | None = None  # choices inside `choices()`, else None
_longest = contextvars.ContextVar[int | None]("longest", default=None)


def runs_kernel(op: str, why_not: str | None, *, rows: int, by_choice: bool = False) -> bool:
    """Return whether `op` runs its kernel; record the choice for `implementations` and log it.

    Without rows the result is False and nothing is recorded: a launch needs at least one block,
    and XLA removes the reference, whose arrays are empty. The same holds inside `reference()`.

    Args:
        op: Name of the op.
        why_not: Reason why the kernel does not support these operands; None means that it does.
        rows: Number of rows or tokens of the operands, padding included.
        by_choice: If True, `why_not` means that the reference is preferred: log no warning.
    """
    if not rows or longest() is not None:
        return False
    is_hopper, missing = kernels_here()
    why = missing or why_not
    chosen = "kernel" if why is None else f"XLA: {why}"
    # On a GPU that has kernels, an op that does not run its kernel is slower than expected.
    level = logging.WARNING if why and is_hopper and not by_choice else logging.INFO
    note(op, chosen, level)
    return why is None


def note(op: str, chosen: str, level: int) -> None:
    """Record the implementation of `op`; log it if it is new.

    When a program that another process traced is loaded from the cache, `note` is called with
    the entries that `choices` collected there.
    """
    if _heard is not None:
        _heard.append((op, chosen, level))
    known = _chosen.setdefault(op, [])
    if chosen not in known:
        known.append(chosen)
        _log.log(level, "%s runs as %s", op, chosen)


@contextlib.contextmanager
def choices() -> Iterator[list[tuple[str, str, int]]]:
    """Collect every choice made inside the context, new or not, as arguments of `note`."""
    global _heard
    _heard = heard = []
    try:
        yield heard
    finally:
        _heard = None


@contextlib.contextmanager
def reference(longest: int) -> Iterator[None]:
    """Make ops that are traced inside the context run references that JAX can differentiate.

    No sequence of theirs has more than `longest` tokens.
    """
    token = _longest.set(longest)
    try:
        yield
    finally:
        _longest.reset(token)


def longest() -> int | None:
    """Return the limit of a sequence's tokens inside `reference(longest)`; None outside."""
    return _longest.get()


def stacked(
    count: Int[Array, ""], most: int, body: Callable[[Array], Array], *, batch: int = 1
) -> Array:
    """Return `body(i)` for i in 0 to `count` - 1 as an array `[most, ...]`, followed by zeros.

    References run their loops with it. JAX cannot differentiate a loop whose number of iterations
    is traced, so inside `reference()` it is `most`, and those from `count` on do nothing. There
    `batch` iterations run at once, and the backward pass computes the values inside `body` again
    instead of storing them.
    """
    if longest() is None:
        row = jax.eval_shape(body, count)

        def one(i, rows):
            return lax.dynamic_update_index_in_dim(rows, body(i), i, 0)

        return lax.fori_loop(0, count, one, jnp.zeros((most, *row.shape), row.dtype))

    def some(indices):
        rows = jax.vmap(body)(indices)
        is_real = (indices < count).reshape((batch,) + (1,) * (rows.ndim - 1))
        return jnp.where(is_real, rows, 0)

    @jax.checkpoint
    def some_or_none(indices):
        rows = jax.eval_shape(some, indices)
        none = jnp.zeros(rows.shape, rows.dtype)
        return lax.cond(indices[0] < count, some, lambda _: none, indices)

    batches = -(-most // batch)
    indices = jnp.arange(batches * batch, dtype=count.dtype).reshape(batches, batch)
    rows = lax.map(some_or_none, indices)
    return rows.reshape(batches * batch, *rows.shape[2:])[:most]


def layer_index(pool: jax.Array, layer: int) -> jax.Array:
    """Return `layer` as a device array, so that all layers share one compiled kernel.

    Raises:
        IndexError: `pool` has no such layer.
    """
    return jnp.asarray(range(pool.shape[0])[layer], jnp.int32)


def implementations() -> dict[str, tuple[str, ...]]:
    """Return the implementations of each op in this process: "kernel", or "XLA: " and the reason.

    An op that was traced with different kinds of operands may have several.
    """
    return {op: tuple(chosen) for op, chosen in _chosen.items()}


def has_kernels() -> bool:
    """Return whether kernels run on the default device."""
    return kernels_here()[1] is None


def kernels_here() -> tuple[bool, str | None]:
    """Return whether the default device is a Hopper GPU, and why no kernel can run (or None)."""
    here = device.default_device()
    if here.platform != "gpu":
        return False, f"the device is a {here.platform}"
    if here.compute_capability != "9.0":
        return False, f"the kernels are for Hopper (9.0), not {here.compute_capability}"
    if jax.__version_info__[:2] != _MEASURED:
        return True, (
            f"the kernels run on jax 0.11 (Python 3.12), where they were measured, not on jax "
            f"{jax.__version__}; pip install 'jaxspec[cuda13]' or 'jaxspec[cuda12]' brings it"
        )
    return True, None
