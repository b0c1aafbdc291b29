"""A process that traces one program for another: `trace_processes.py` starts it.

Standard input brings a pickled `TraceRequest`, and standard output takes what `program_cache` keeps
of the program. The process that asks has started this one, so they trust each other.
"""

import dataclasses
import os
import pickle
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import device
from jaxspec.models.base import Model
from jaxspec.plan import Program
from jaxspec.runner.programs import program_cache
from jaxspec.runner.step import StepConfig, jitted_step


class Recipe(NamedTuple):
    """What a model without values is made from."""

    family: type[Model]
    config: Any  # the model's own
    dtype: jnp.dtype
    tensors: tuple[str, ...]  # canonical names, which tell what the checkpoint has

    @staticmethod
    def of(model: Model, dtype: jnp.dtype) -> "Recipe":
        """The recipe of a model whose parameters are of `dtype`."""
        tensors = tuple(placement.name for placement in model.checkpoint())
        return Recipe(type(model), model.config, dtype, tensors)

    def model(self) -> Model:
        """The model without values."""
        return nnx.eval_shape(lambda: self.family(self.config, self.dtype, self.tensors))


class TraceRequest(NamedTuple):
    """A program in what another process can make it from."""

    recipe: Recipe
    config: StepConfig  # without the model and its weights, which can't be pickled
    program: Program
    others: tuple[Any, ...]  # the step's arguments after the weights, as shapes and dtypes
    target: device.StandIn
    platform: str  # as lowering calls it
    settings: dict[str, Any]  # of JAX
    identity: str | None  # `program_cache.identity` of the program

    @staticmethod
    def of(
        recipe: Recipe, config: StepConfig, program: Program, others: tuple[Any, ...]
    ) -> "TraceRequest":
        """The request for a program of this process; `others` are arrays."""
        return TraceRequest(
            recipe=recipe,
            config=dataclasses.replace(config, model=None, weights=None),
            program=program,
            others=jax.tree.map(program_cache.described, others),
            target=device.StandIn.of(device.default_device()),
            platform=program_cache.platform(),
            settings=program_cache.settings(),
            identity=program_cache.identity((config, program)),
        )


def trace(request: TraceRequest) -> bytes:
    """What is to be kept of the program.

    Raises:
        ValueError: this process would trace another program.
    """
    for name, value in request.settings.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    device.trace_for(request.target)
    graph, weights = nnx.split(request.recipe.model())
    leaves, tree = jax.tree.flatten(weights)
    config = dataclasses.replace(request.config, model=graph, weights=tree)
    if program_cache.identity((config, request.program)) != request.identity:
        raise ValueError(
            "A process must trace the program that it was asked for, and would make another of it."
        )
    args = tuple(leaves), *request.others
    return program_cache.traced(jitted_step(config, request.program), args, request.platform)


def main() -> None:
    """Answer one request, and leave the GPU alone."""
    jax.config.update("jax_platforms", "cpu")
    # What libraries print must not get into the answer.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with answer:
        answer.write(trace(pickle.load(sys.stdin.buffer)))
