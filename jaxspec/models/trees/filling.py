"""Filling: new values of a module's leaves, made one by one."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.checkpoint import Checkpoint, listed
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.transfer import to_device
from jaxspec.models.trees.checkpoint import Tensor, TreeCheckpoint, check_there
from jaxspec.models.trees.leaves import Leaf, Part, after, copied, is_finite, near
from jaxspec.models.weights import sources_of
from jaxspec.parallel import Group

# While a value is made, tensors of the next ones are copied to the devices. A single copy from the
# host runs at 5 GB/s (H200), several at once at 33.
_MOST_IN_FLIGHT = 512 * 2**20  # bytes of tensors
_MOST_BEGUN = 16


class Maker(Protocol):
    """Makes the value of one leaf."""

    def compile(self, before: jax.Array) -> None:
        """Compile the programs that are new."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the tensors, which a device may hold copies of."""
        ...

    def begin(self, before: jax.Array | None) -> "Begun":
        """Start to copy the tensors to the devices of the value before."""
        ...


class Begun(NamedTuple):
    """A value whose tensors are being copied to the devices, and the size of these copies."""

    make: Callable[[], jax.Array]
    num_bytes: int


Before = Callable[[int], jax.Array]
"""Returns the value of a leaf, by its index."""


class Filling:
    """New values of some leaves of a module."""

    def __init__(self, arrays: Mapping[str, Tensor], makers: Mapping[int, Maker]):
        """Refer to the tensors; `makers` are by index of the leaf."""
        self.arrays, self._makers = arrays, makers

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(array.nbytes for array in self.arrays.values())

    def compile(self, before: Before) -> None:
        """Compile the programs that are new, which `values` would do, too."""
        for index, maker in self._makers.items():
            maker.compile(before(index))

    def values(self, before: Before) -> Iterator[tuple[int, jax.Array]]:
        """Yield the index and the value of each leaf that changes.

        A value is made when it is asked for.
        """
        return self._made(before)

    def first_values(self) -> Iterator[tuple[int, jax.Array]]:
        """Yield the index and the value of each leaf of a module without values."""
        return self._made(lambda index: None)

    def _made(self, before: Callable[[int], jax.Array | None]) -> Iterator[tuple[int, jax.Array]]:
        begun: deque[tuple[int, Begun]] = deque()
        try:
            for index, maker in self._makers.items():
                while begun and not _has_room(begun, maker.num_bytes):
                    yield _value(begun)
                begun.append((index, maker.begin(before(index))))
            while begun:
                yield _value(begun)
        finally:
            begun.clear()  # the traceback of an error keeps this frame

    def check_there(self, name: str) -> None:
        """Raise ValueError if an array was deleted meanwhile; `name` is that of the argument."""
        for path, array in self.arrays.items():
            check_there(name, path, array)

    def check_finite(self, name: str) -> None:
        """Raise ValueError unless all numbers are finite. Waits for the devices."""
        found = {
            path: np.isfinite(array).all() if isinstance(array, np.ndarray) else is_finite(array)
            for path, array in self.arrays.items()
            if jnp.issubdtype(array.dtype, jnp.floating)
        }
        if wrong := [path for path, finite in found.items() if not finite]:
            raise ValueError(
                f"{name} must be finite with check_finite=True, and {listed(wrong)} are not. "
                "Nothing was changed; look at the step of the trainer before."
            )


class LeafOfRank(NamedTuple):
    """The parameter of one device, as far as tensors fill it."""

    placements: list[Placement]  # stored ones
    names: list[str]  # of their tensors in the tree
    leaf: Leaf
    is_whole: bool  # no tensor is missing
    is_read: bool  # values are computed on the host, from scales or by rounding


class FromTensors(NamedTuple):
    """Makes a leaf of published tensors."""

    group: Group
    of_ranks: Sequence[LeafOfRank]
    published: Mapping[str, list[str]]
    tree: TreeCheckpoint
    checkpoint: Checkpoint

    def compile(self, before: jax.Array) -> None:
        """See `Maker`."""
        for device, part in self._by_device(before):
            if part.placements and not part.is_read:
                part.leaf.compiled(self._tensors(part), device, has_base=not part.is_whole)

    def begin(self, before: jax.Array | None) -> Begun:
        """See `Maker`."""
        begun = [self._on(device, part, before) for device, part in self._by_device(before)]

        def make():
            values = [each.make() for each in begun]
            return values[0] if self.group.size == 1 else self.group.stacked(values)

        return Begun(make, sum(each.num_bytes for each in begun))

    @property
    def num_bytes(self) -> int:
        """See `Maker`."""
        return sum(x.nbytes for part in self.of_ranks for x in self._tensors(part))

    def _by_device(self, before: jax.Array | None) -> Iterator[tuple[Any, LeafOfRank]]:
        devices = [_device(self.group, before, rank) for rank in self.group.own_ranks]
        return zip(devices, self.of_ranks, strict=True)

    def _on(self, device: Any, part: LeafOfRank, before: jax.Array | None) -> Begun:
        if part.is_read:
            return Begun(functools.partial(self._read, device, part), 0)
        base = None
        if not part.is_whole:
            assert before is not None
            (base,) = (each.data for each in before.addressable_shards if each.device == device)
            if not part.placements:
                return Begun(lambda: copied(base, part.leaf.dtype), 0)
        return _begun(part.leaf, self._tensors(part), device, base)

    def _read(self, device: Any, part: LeafOfRank) -> jax.Array:
        with jax.default_device(device):
            sources = sources_of(part.placements, self.published, self.checkpoint)
            (value,) = to_device(sources, self.checkpoint, lambda num_bytes: None)
        return value

    def _tensors(self, part: LeafOfRank) -> list[Tensor]:
        return [self.tree.arrays[name] for name in part.names]


class Copied(NamedTuple):
    """Makes a leaf of one that the engine's model could have."""

    group: Group
    array: Tensor
    dtype: np.dtype

    def compile(self, before: jax.Array) -> None:
        """See `Maker`. The devices of a group compile at the first value."""
        if self.group.size == 1:
            self._leaf.compiled([self.array], _device(self.group, before, 0), has_base=False)

    def begin(self, before: jax.Array | None) -> Begun:
        """See `Maker`."""
        if self.group.size == 1:
            return _begun(self._leaf, [self.array], _device(self.group, before, 0), None)
        there = jax.device_put(self.array, self.group.sharding)
        num_bytes = 0 if there is self.array else self.array.nbytes
        return Begun(lambda: after([self.array], copied(there, self.dtype)), num_bytes)

    @property
    def num_bytes(self) -> int:
        """See `Maker`."""
        return self.array.nbytes

    @property
    def _leaf(self) -> Leaf:
        shape = tuple(self.array.shape)
        whole = tuple(map(range, shape))
        return Leaf(shape, self.dtype, (Part(whole, whole, transpose=False, scale=1.0),))


def _begun(leaf: Leaf, tensors: list[Tensor], device: Any, base: jax.Array | None) -> Begun:
    there = [near(each, device) for each in tensors]
    pairs = zip(tensors, there, strict=True)
    num_bytes = sum(tensor.nbytes for tensor, copy in pairs if copy is not tensor)
    return Begun(lambda: after(tensors, leaf.of(there, device, base)), num_bytes)


def _has_room(begun: deque[tuple[int, Begun]], num_bytes: int) -> bool:
    in_flight = sum(each.num_bytes for _, each in begun)
    return in_flight + num_bytes <= _MOST_IN_FLIGHT and len(begun) < _MOST_BEGUN


def _value(begun: deque[tuple[int, Begun]]) -> tuple[int, jax.Array]:
    index, first = begun.popleft()
    return index, first.make()


def _device(group: Group, before: jax.Array | None, rank: int) -> Any:
    """Return the device of a rank; without a group that of the leaf before."""
    if group.size == 1 and before is not None:
        return next(iter(before.sharding.device_set))  # also of a deleted array
    return group.devices[rank]
