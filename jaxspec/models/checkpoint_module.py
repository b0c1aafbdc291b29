"""CheckpointModule: a module whose weights a checkpoint provides; ModelSpec: how to rebuild one."""

import abc
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.layers.weight_form import Form
from jaxspec.models.layers.weight_matrix import forms_of, hold


class CheckpointModule(nnx.Module, abc.ABC):
    """A language model, or a draft head that has a checkpoint of its own.

    A family defines how its config.json is parsed, how its tensors are named, and which parameters
    they fill.
    """

    config: ModelConfig
    # Canonical names of tensors that a checkpoint may have twice, and those of the originals. A
    # copy must be equal and is not loaded.
    copies: ClassVar[Mapping[str, str]] = {}
    draft_method: ClassVar[str] = "draft_model"  # method of a `speculative_config` with it

    @abc.abstractmethod
    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """Declare the parameters.

        Args:
            config: The parsed config.json.
            dtype: Dtype of the weights.
            tensors: Canonical names of the checkpoint's tensors, which decide on optional parts.
                None means there is no checkpoint, and config.json alone decides.
        """

    @staticmethod
    @abc.abstractmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """Parse the family's config.json.

        Raises:
            ValueError: A field is missing, malformed or not implemented.
        """

    @staticmethod
    @abc.abstractmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """Map a tensor's name in any spelling to the canonical one; None if it is not used.

        `config` gives a layer's type where names alone do not.
        """

    @classmethod
    def uses(cls, config: Any) -> Callable[[str], bool]:
        """Return a predicate of tensor names in any spelling: True if the module uses it."""
        return lambda name: cls.canonical_name(name, config) is not None

    @abc.abstractmethod
    def checkpoint(self) -> Iterator[Placement]:
        """Yield the placements of all tensors, by canonical name."""

    def check_values(self) -> None:
        """Raise ValueError if loaded weights have invalid values."""
        return  # any float is a valid weight


class ModelSpec(NamedTuple):
    """All that is needed to rebuild a module without values."""

    family: type[CheckpointModule]
    config: Any  # the module's config
    dtype: jnp.dtype
    tensors: tuple[str, ...]  # canonical names of the checkpoint's tensors
    forms: tuple[Form | None, ...]  # of the module's matrices

    @staticmethod
    def of(model: CheckpointModule, dtype: jnp.dtype) -> "ModelSpec":
        tensors = tuple(placement.name for placement in model.checkpoint())
        return ModelSpec(type(model), model.config, dtype, tensors, forms_of(model))

    @property
    def whole(self) -> "ModelSpec":
        """The spec of the module that devices share, as on a single device."""
        return self._replace(config=self.config.whole)

    def model(self) -> Any:
        """Return an instance of `family` without values."""
        module = nnx.eval_shape(lambda: self.family(self.config, self.dtype, self.tensors))
        hold(module, self.forms)
        return module

    @staticmethod
    def weights_of(module: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(nnx.state(module)))

    def with_weights(self, leaves: Iterable[Any]) -> Any:
        """Return the module with these weights, in the order of `weights_of`."""
        graph, tree = _structure(self)
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


@functools.lru_cache(maxsize=8)
def _structure(model_spec: ModelSpec) -> tuple[Any, Any]:
    """Return the graph definition of a module and the tree structure of its weights."""
    graph, weights = nnx.split(model_spec.model())
    return graph, jax.tree.structure(weights)
