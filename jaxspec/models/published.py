"""Published: a module that a checkpoint gives its weights; ModelRecipe: what one is made from."""

import abc
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import ModelConfig
from jaxspec.models.fields import Fields
from jaxspec.models.layers.parameters import Placement


class Published(nnx.Module, abc.ABC):
    """A model, or a head that drafts for another checkpoint's model.

    A family says how its config.json is read, how its tensors are called, and where they go.
    """

    config: ModelConfig

    @abc.abstractmethod
    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, tensors: Collection[str] | None = None
    ):
        """Declare the parameters, in `dtype`.

        `tensors`: canonical names in the checkpoint, which tell what is there. None: there is no
        checkpoint, and config.json alone tells.
        """

    @staticmethod
    @abc.abstractmethod
    def parse_config(fields: Fields) -> ModelConfig:
        """The family's reading of a config.json.

        Raises:
            ValueError: a field is missing, malformed or not implemented.
        """

    @staticmethod
    @abc.abstractmethod
    def canonical_name(name: str, config: ModelConfig) -> str | None:
        """The one spelling of a published tensor's name; None for a tensor that is not used.

        `config` tells what a layer is, where names alone do not.
        """

    @abc.abstractmethod
    def checkpoint(self) -> Iterator[Placement]:
        """The published tensors, by canonical name."""

    def check_values(self) -> None:
        """ValueError if weights that were read are not such as they must be."""
        return  # any number is a weight


class ModelRecipe(NamedTuple):
    """What a module without values is made from."""

    family: type[Published]
    config: Any  # the module's own
    dtype: jnp.dtype
    tensors: tuple[str, ...]  # canonical names, which tell what the checkpoint has

    @staticmethod
    def of(model: Published, dtype: jnp.dtype) -> "ModelRecipe":
        """The recipe of a module whose parameters are of `dtype`."""
        tensors = tuple(placement.name for placement in model.checkpoint())
        return ModelRecipe(type(model), model.config, dtype, tensors)

    def model(self) -> Any:
        """The module without values, of the class `family`."""
        return nnx.eval_shape(lambda: self.family(self.config, self.dtype, self.tensors))

    @staticmethod
    def weights_of(module: Any) -> tuple[Any, ...]:
        """A module's weights, as `with_weights` takes them."""
        return tuple(jax.tree.leaves(nnx.state(module)))

    def with_weights(self, leaves: Iterable[Any]) -> Any:
        """The module with the weights that `weights_of` gave."""
        graph, tree = _structure(self)
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


@functools.lru_cache(maxsize=8)
def _structure(recipe: ModelRecipe) -> tuple[Any, Any]:
    """The graph of a module, and how its weights lie in it."""
    graph, weights = nnx.split(recipe.model())
    return graph, jax.tree.structure(weights)
