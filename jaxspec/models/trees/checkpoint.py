"""TreeCheckpoint: arrays in memory as a `Checkpoint`; the names of the arrays of a tree."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxspec.checks import shown
from jaxspec.models.safetensors_file import DTYPES, INTEGERS, QUANTISED, StoredTensor

Tensor = jax.Array | np.ndarray
_WORDS = {dtype: word for word, dtype in (DTYPES | INTEGERS | QUANTISED).items()}


class TreeCheckpoint:
    """The `Checkpoint` of arrays on the host or on devices."""

    path = Path("the tree of weights")
    asked_by = "config.json"
    remedy = "LLM.weight_specs() has the names, shapes and dtypes of a loaded model."

    def __init__(self, arrays: Mapping[str, Tensor]):
        """Refer to `arrays`, without a copy."""
        self.arrays = arrays
        self._last = threading.local()  # per reading thread

    def __enter__(self) -> "TreeCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._last = threading.local()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.arrays)

    def files_of(self, name: str) -> list[str]:
        return [name]

    def stored(self, name: str) -> StoredTensor:
        array = self.arrays[name]
        word = _WORDS.get(np.dtype(array.dtype), str(array.dtype))
        return StoredTensor(word, tuple(array.shape), 0, array.nbytes)

    def bytes_by_type(self) -> Mapping[str, int]:
        num_bytes: Counter[str] = Counter()
        for name in self.arrays:
            stored = self.stored(name)
            num_bytes[stored.dtype] += stored.num_bytes
        return num_bytes

    def read(self, name: str, first: int, into: np.ndarray) -> None:
        """See `Checkpoint.read`."""
        held, elements = getattr(self._last, "read", ("", into))
        if held != name:
            elements = _on_host(self.arrays[name]).ravel()
            self._last.read = name, elements
        into[...] = elements[first : first + into.size]

    def check_unchanged(self) -> None:
        return  # arrays on devices can't be written to


def _on_host(array: Tensor) -> np.ndarray:
    # The copy, and not the caller's array, keeps what it has on the host.
    return np.asarray(array if isinstance(array, np.ndarray) else jnp.array(array, copy=True))


def named_arrays(name: str, tree: Any) -> dict[str, Tensor]:
    """Return the arrays of a tree by name; names of nested mappings are joined by dots.

    Args:
        name: Name of the argument, for errors.
        tree: A mapping, an `nnx.State`, or an iterable of pairs of a name and an array.

    Raises:
        ValueError: it is none of these, or a name is no text or is there twice, or a value is no
            array or is deleted.
    """
    found: dict[str, Tensor] = {}
    for path, value in _pairs(name, tree):
        if path in found:
            raise ValueError(
                f"{name} must have each tensor once, got {shown(path)} twice. Drop one of the two."
            )
        found[path] = _array(name, path, value)
    if not found:
        raise ValueError(f"{name} must have tensors, got none. {TreeCheckpoint.remedy}")
    return found


def _pairs(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, nnx.State):
        yield from own_names(tree)
    elif isinstance(tree, Mapping):
        yield from _nested(name, tree, "")
    elif isinstance(tree, Iterable) and not isinstance(tree, str | bytes | np.ndarray | jax.Array):
        for pair in tree:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError(
                    f"{name} must yield pairs of a name and an array, got {shown(pair)}. Pass a "
                    "dict, or the items of one."
                )
            path, value = pair
            yield _text(name, path), _kept(name, path, value)
    else:
        raise ValueError(
            f"{name} must be a mapping from names to arrays, an nnx.State or an iterator of pairs, "
            f"got {shown(tree)}. {TreeCheckpoint.remedy}"
        )


def _kept(name: str, path: str, value: Any) -> Any:
    """Return a copy of an array whose memory an iterator may reuse for the next pair."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if _is_foreign(value):
        return jnp.array(_imported(name, path, value), copy=True).block_until_ready()
    return value


def _nested(name: str, tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = prefix + _text(name, str(key) if isinstance(key, int) and prefix else key)
        if isinstance(value, Mapping) and not isinstance(value, nnx.Variable):
            yield from _nested(name, value, f"{path}.")
        else:
            yield path, value


def _text(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"Names of {name} must be texts, got {shown(key)}. Use published names.")
    return key


def _array(name: str, path: str, value: Any) -> Tensor:
    if isinstance(value, nnx.Variable):
        value = value.get_value()
    if _is_foreign(value):
        value = _imported(name, path, value)
    if not isinstance(value, jax.Array | np.ndarray) or isinstance(value, Tracer):
        raise ValueError(
            f"{name} must have arrays of JAX, NumPy or DLPack, got {shown(value)} for "
            f"{shown(path)}. Convert it, outside of jax.jit."
        )
    check_there(name, path, value)
    return value


def _is_foreign(value: Any) -> bool:
    is_own = isinstance(value, jax.Array | np.ndarray | nnx.Variable)
    return not is_own and hasattr(value, "__dlpack__")


def _imported(name: str, path: str, value: Any) -> jax.Array:
    try:
        return jnp.from_dlpack(value)
    except Exception as error:
        raise ValueError(
            f"{name} must have arrays that JAX can import by DLPack, and {shown(path)} is none: "
            f"{error!s:.200} Convert it to NumPy."
        ) from error


def check_there(name: str, path: str, value: Tensor) -> None:
    """Raise ValueError if an array was deleted or is not in this process."""
    if isinstance(value, np.ndarray):
        return
    if value.is_deleted():
        raise ValueError(
            f"{name} must have arrays that are not deleted, and {shown(path)} is: it was donated "
            "or deleted. Pass the arrays that replaced it."
        )
    if not value.is_fully_addressable:
        raise ValueError(
            f"{name} must have arrays of this process, and {shown(path)} is on other hosts, too. "
            "Gather it before."
        )


def own_names(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an `nnx.State` with the names of their attributes, joined by dots."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        yield ".".join(keys[:-1] if keys[-1] == "value" else keys), leaf
