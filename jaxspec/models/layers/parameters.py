"""Parameters of layers, and their mapping from tensors of the checkpoint."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Picked = range | np.ndarray  # indices along an axis


@dataclasses.dataclass(frozen=True)
class Placement:
    """A tensor and its target: `param[index] = scale * tensor[part]`, or its transpose.

    A tensor may have several placements, each of a part, and a parameter several that do not
    overlap; the rest of the parameter is zeros. Either all placements of a parameter are transposed
    or none is; apart from that, shapes may differ only in axes of size 1. If a checkpoint lacks the
    tensor, it may have the same values in other tensors: `instead` yields their placements, one per
    tensor. It is called only when needed, because there may be thousands.
    """

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    param: Any  # an `nnx.Param`, or a `WeightMatrix`, which stores it in its parameters
    transpose: bool = False  # [out, in] in the checkpoint, [in, out] in the parameter
    index: Any = ...  # into the parameter: integers, slices and `...`, as in NumPy
    part: Any = ...  # into the tensor, likewise; also an array of indices >= 0 per axis
    scale: float = 1.0  # applied in float32; the result is rounded once
    # Axis of the tensor, and sizes of the parts along it that devices share one by one; None means
    # that each axis is one part.
    segments: tuple[int, tuple[int, ...]] | None = None
    holder: int | None = None  # number of the only device of a group with the tensor; None: all
    instead: Callable[[], Iterator["Placement"]] | None = None  # None if there is one spelling

    def scaled(self, factor: float) -> "Placement":
        """Return the placement with values multiplied by `factor`, in either spelling."""
        if factor == 1.0:
            return self
        instead, scale = self.instead, self.scale * factor
        others = None if instead is None else lambda: (each.scaled(factor) for each in instead())
        return dataclasses.replace(self, scale=scale, instead=others)

    def or_part_of(self, name: str, rows: tuple[int, ...], first: int) -> "Placement":
        """Return the placement with an alternative: rows from `first` on of the tensor `name`.

        Args:
            name: Name of that tensor.
            rows: Sizes of its parts, as in `segments`.
            first: Its first row of this one.
        """
        own = self.part if self.part is not ... else slice(0, self.shape[0])

        def joined() -> Iterator["Placement"]:
            yield dataclasses.replace(
                self,
                name=name,
                shape=(sum(rows), *self.shape[1:]),
                segments=(0, rows),
                part=slice(first + own.start, first + own.stop),
            )

        return dataclasses.replace(self, instead=joined)

    @property
    def is_integer(self) -> bool:
        """True if the tensor has integers, such as token ids."""
        return jnp.issubdtype(self.param.dtype, jnp.integer)


def box(shape: tuple[int, ...], index: Any) -> list[Picked]:
    """Return the indices that an index expression selects along each axis."""
    index = index if isinstance(index, tuple) else (index,)
    ellipses = [place for place, entry in enumerate(index) if entry is ...]
    at = ellipses[0] if ellipses else len(index)
    rest = (slice(None),) * (len(shape) - len(index) + len(ellipses))
    index = (*index[:at], *rest, *index[at + 1 :])
    return [_picked(size, entry) for size, entry in zip(shape, index, strict=True)]


def _picked(size: int, entry: Any) -> Picked:
    if isinstance(entry, np.ndarray):
        return entry
    picked = range(size)[entry]
    return picked if isinstance(picked, range) else range(picked, picked + 1)


def as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Return indices along an axis as a slice if they are consecutive."""
    first, last = int(indices[0]), int(indices[-1])
    is_run = last - first + 1 == len(indices) and bool((np.diff(indices) == 1).all())
    return slice(first, last + 1) if is_run else indices


def scaled(placements: Iterable[Placement], factors: Mapping[str, float]) -> Iterator[Placement]:
    """Scale placements by the factors of tensors, which are keyed by the ends of their names."""
    for placement in placements:
        ends = [end for end in factors if placement.name.endswith(end)]
        yield placement.scaled(factors[ends[0]] if ends else 1.0)


Init = Callable[..., jax.Array]  # (key, shape, dtype) -> value; jit caches by identity
NORMAL: Init = jax.nn.initializers.normal(0.02)  # `initializer_range` of Qwen's configs
NO_BIAS: Init = jax.nn.initializers.zeros


def _centred(key, shape, dtype, *, axis: int):
    """Draw from a normal distribution, with a mean of zero along the axis of inputs."""
    drawn = NORMAL(key, shape, dtype)
    return drawn - jnp.mean(drawn, axis=axis, keepdims=True)


# After a squared ReLU no input is negative. Without centring, a random matrix would give nearly the
# same output for all tokens, and after some layers all rows would choose the same experts.
CENTRED_COLUMNS: Init = functools.partial(_centred, axis=-2)  # [in, out]
CENTRED_ROWS: Init = functools.partial(_centred, axis=-1)  # [out, in]


def draw_rates(key: jax.Array, count: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Draw `count` log decay rates, and inputs of the softplus for step sizes, as Mamba does.

    Rates are from 1 to 16, and steps from 0.001 to 0.1 (Gu and Dao 2023, arXiv 2312.00752).
    """
    of_rate, of_step = jax.random.split(key)
    rate = jax.random.uniform(of_rate, (count,), dtype, 1.0, 16.0)
    least, most = math.log(1e-3), math.log(1e-1)
    step = jnp.exp(jax.random.uniform(of_step, (count,), dtype, least, most))
    return jnp.log(rate), step + jnp.log(-jnp.expm1(-step))  # inverse softplus


def declare(shape: tuple[int, ...], dtype: jnp.dtype, init: Init = NORMAL) -> nnx.Param:
    """Return a parameter for a model built under `nnx.eval_shape`; values are loaded later.

    `init` draws the value if there is no checkpoint (`models/weights.py`).
    """
    return nnx.Param(jnp.zeros(shape, dtype), init=init)
