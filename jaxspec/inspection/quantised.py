"""Quantised weights of a model that is inspected: their formats, and how many stay in these."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax.numpy as jnp

from jaxspec.models.base import Model
from jaxspec.models.checkpoint import Checkpoint
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_form import Grain
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint, StoredFormat
from jaxspec.models.quantised.holding import Held, hold_as_published, hold_drawn
from jaxspec.models.quantised.option import QuantisedOptions
from jaxspec.models.quantised.rounded import ROUNDED, RoundedCheckpoint
from jaxspec.models.quantised.scheme import Scheme
from jaxspec.models.shards import of_devices

_ROUNDING = "quantization='fp8'"

Formats = Mapping[str, StoredFormat]
Counts = Mapping[int, int]
"""Numbers of parameters that are held in 8 or 4 bits, by these bits."""


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Quantised weights of a folder."""

    kind: str  # as declared
    dtype: str  # to which they are dequantised
    file: str = "config.json"  # that declares the kind
    formats: Formats | None = None  # in files; None if they were not read
    kv_scales: int = 0  # number of scales of keys and values
    scales_kv: bool = False  # these are used
    dequantised: Formats | None = None  # of them, those that are not held
    held: Counts = dataclasses.field(default_factory=dict)
    on_hopper: Counts = dataclasses.field(default_factory=dict)  # others, in bfloat16
    terms: int = 2  # e4m3 numbers that an activation becomes before FP8 multiplies it

    @property
    def is_rounded(self) -> bool:
        """True if weights of 16 or 32 bits are rounded while they are read."""
        return self.file == _ROUNDING

    @staticmethod
    def declared(scheme: Scheme, checkpoint: Checkpoint | None, dtype: jnp.dtype) -> "Quantised":
        """Describe a folder, all of whose weights are dequantised."""
        if not isinstance(checkpoint, QuantisedCheckpoint):
            return Quantised(scheme.kind, dtype.name, scheme.file)
        return Quantised(
            scheme.kind,
            dtype.name,
            scheme.file,
            checkpoint.formats(),
            checkpoint.num_kv_scales,
            bool(checkpoint.kv_scales),
        )

    @staticmethod
    def of_rounded(before: "Quantised | None", dtype: jnp.dtype) -> "Quantised":
        """Describe a folder whose weights are rounded, and which had this description `before`."""
        before = before or Quantised("fp8", dtype.name)
        return dataclasses.replace(before, kind=ROUNDED.kind, file=_ROUNDING, formats=None)


def hold_stored(
    quantised: Quantised,
    of_ranks: Iterable[Sequence[Placement]],
    published: Mapping[str, list[str]],
    checkpoint: QuantisedCheckpoint | RoundedCheckpoint,
    options: QuantisedOptions,
) -> Quantised:
    """Hold matrices of a model as loading does, and count them; see `hold_as_published`."""
    held = hold_as_published(of_ranks, published, checkpoint, options)
    formats = checkpoint.formats()

    def count(names: Collection[str]) -> int:
        return _parameters(formats) - _parameters(checkpoint.formats(without=names))

    counted = _counted(quantised, held, count, options)
    others = checkpoint.formats(without=held.here)
    return dataclasses.replace(counted, formats=formats, dequantised=others)


def hold_declared(
    quantised: Quantised,
    model: Model,
    local: Model,
    devices: int,
    scheme: Scheme | None,
    options: QuantisedOptions,
) -> Quantised:
    """Hold matrices of a local model as for random weights, and count those of the whole one.

    Args:
        quantised: Description without counts.
        model: The abstract model.
        local: The same with the sizes of one device.
        devices: Number of devices.
        scheme: The scheme of the folder.
        options: Those of `LLM`.
    """
    scheme = ROUNDED if quantised.is_rounded else scheme
    placements = list(model.checkpoint())
    held = hold_drawn(of_devices(placements, local.checkpoint(), devices), scheme, options)
    sizes = {each.name: math.prod(each.shape) for each in placements}
    return _counted(quantised, held, lambda names: sum(sizes[name] for name in names), options)


def _counted(
    quantised: Quantised,
    held: Held,
    count: Callable[[Collection[str]], int],
    options: QuantisedOptions,
) -> Quantised:
    """Count the parameters of weights by their bits; `count` returns those of some names."""

    def by_bits(grains: Mapping[str, Grain]) -> Counts:
        names = dict[int, list[str]]()
        for name, grain in grains.items():
            names.setdefault(grain.bits, []).append(name)
        return {bits: count(of_bits) for bits, of_bits in names.items()}

    others = {name: held.on_hopper[name] for name in held.on_hopper.keys() - held.here.keys()}
    return dataclasses.replace(
        quantised, held=by_bits(held.here), on_hopper=by_bits(others), terms=options.terms
    )


def _parameters(formats: Formats) -> int:
    return sum(each.parameters for each in formats.values())
