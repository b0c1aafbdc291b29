"""Parameters of layers, and how published tensors map onto them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Placement:
    """A published tensor and where it goes: `param[index] = scale * tensor[part]`, or its .T.

    A tensor may have several placements, of a part each, and a parameter several that do not
    overlap; zeros stay where it has none. All placements of a parameter are transposed, or none is;
    then only axes of size 1 may come and go. A checkpoint that lacks the tensor may have the same
    values in others: `instead` gives their placements, one for each tensor. It is called only where
    it is needed, because there may be thousands.
    """

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    param: nnx.Param
    transpose: bool = False  # published [out, in], kept [in, out]
    index: Any = ...  # integers, slices, `...`, as NumPy takes them
    part: Any = ...  # of the tensor, as `index`; for an axis, an array of places >= 0, too
    scale: float = 1.0  # a product in float32, rounded once to the parameter's dtype
    instead: Callable[[], Iterator["Placement"]] | None = None  # None: there is one spelling

    def scaled(self, factor: float) -> "Placement":
        """The same place for values that are multiplied by `factor`, in either spelling."""
        if factor == 1.0:
            return self
        instead, scale = self.instead, self.scale * factor
        others = None if instead is None else lambda: (each.scaled(factor) for each in instead())
        return dataclasses.replace(self, scale=scale, instead=others)

    def or_part_of(self, name: str, rows: int, first: int) -> "Placement":
        """The same, which may also come as some rows of the tensor `name`, from `first` on.

        That tensor has so many `rows`, and this one goes to one place as it is, or a part of it.
        """
        own = self.part if self.part is not ... else slice(0, self.shape[0])

        def joined() -> Iterator["Placement"]:
            yield dataclasses.replace(
                self,
                name=name,
                shape=(rows, *self.shape[1:]),
                part=slice(first + own.start, first + own.stop),
            )

        return dataclasses.replace(self, instead=joined)

    @property
    def is_integer(self) -> bool:
        """Whether the tensor is one of integers, such as token ids, and not of weights."""
        return jnp.issubdtype(self.param.dtype, jnp.integer)


def scaled(placements: Iterable[Placement], factors: Mapping[str, float]) -> Iterator[Placement]:
    """The placements, with the factors of tensors that are found by the ends of their names."""
    for placement in placements:
        ends = [end for end in factors if placement.name.endswith(end)]
        yield placement.scaled(factors[ends[0]] if ends else 1.0)


Init = Callable[..., jax.Array]  # (key, shape, dtype) to a value; one object for each kind
NORMAL: Init = jax.nn.initializers.normal(0.02)  # what Qwen's configurations give


def _centred(key, shape, dtype, *, axis: int):
    """A normal draw whose sums along the axis of the inputs are zero."""
    drawn = NORMAL(key, shape, dtype)
    return drawn - jnp.mean(drawn, axis=axis, keepdims=True)


# Behind a squared ReLU no input is negative. Drawn without this, a matrix would put out nearly the
# same for all tokens, whatever they are, and after some layers all rows would choose the same.
CENTRED_COLUMNS: Init = functools.partial(_centred, axis=-2)  # [in, out]
CENTRED_ROWS: Init = functools.partial(_centred, axis=-1)  # [out, in]


def draw_rates(key: jax.Array, count: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """`count` log decay rates, and inputs of the softplus that gives step sizes, as Mamba begins.

    Rates are from 1 to 16, and steps from 0.001 to 0.1 (Gu and Dao 2023, arXiv 2312.00752).
    """
    of_rate, of_step = jax.random.split(key)
    rate = jax.random.uniform(of_rate, (count,), dtype, 1.0, 16.0)
    least, most = math.log(1e-3), math.log(1e-1)
    step = jnp.exp(jax.random.uniform(of_step, (count,), dtype, least, most))
    return jnp.log(rate), step + jnp.log(-jnp.expm1(-step))  # softplus undone


def declare(shape: tuple[int, ...], dtype: jnp.dtype, init: Init = NORMAL) -> nnx.Param:
    """A parameter of zeros: models are built under `nnx.eval_shape`, and get their values later.

    `init` draws the value where there is no checkpoint (`models/dummy.py`).
    """
    return nnx.Param(jnp.zeros(shape, dtype), init=init)
