"""A process that traces one program for another: `trace_processes.py` starts it.

Standard input brings a pickled `TraceRequest`. The answer is what `program_cache` keeps of the
program. The process that asks has started this one, so they trust each other.
"""

import dataclasses
import os
import pickle
import sys
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxspec import device
from jaxspec.models.base import ModelRecipe
from jaxspec.plan import Program
from jaxspec.runner.programs import program_cache, program_key
from jaxspec.runner.step import StepConfig, jitted_step


class TraceRequest(NamedTuple):
    """A program in what another process can make it from."""

    recipe: ModelRecipe
    config: StepConfig  # without the model and its weights, which can't be pickled
    program: Program
    arguments: tuple[Any, ...]  # of the step, behind the weights, as shapes and dtypes
    target: device.StandIn
    platform: str  # as lowering calls it
    settings: dict[str, Any]  # of JAX
    fingerprint: str | None  # of the program, by `program_key.fingerprint`

    @staticmethod
    def of(
        recipe: ModelRecipe,
        config: StepConfig,
        program: Program,
        args: tuple[Any, ...],
        closed_over: Any,
    ) -> "TraceRequest":
        """The request for a program that this process would call with the arrays `args`."""
        _, *others = args
        return TraceRequest(
            recipe=recipe,
            config=dataclasses.replace(config, model=None, weights=None),
            program=program,
            arguments=jax.tree.map(program_key.described, tuple(others)),
            target=device.StandIn.of(device.default_device()),
            platform=program_cache.platform(),
            settings=program_key.settings(),
            fingerprint=program_key.fingerprint(args, closed_over),
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
    args = tuple(leaves), *request.arguments
    depends = program_key.words(config), request.program
    if program_key.fingerprint(args, depends) != request.fingerprint:
        raise ValueError(
            "A process must trace the program that it was asked for, and would make another of it."
        )
    return program_cache.traced(jitted_step(config, request.program), args, request.platform)


def main(answer: int) -> None:
    """Answer one request on the file descriptor `answer`, and leave the GPU alone."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_platform_name", "")
    with os.fdopen(answer, "wb") as file:
        file.write(trace(pickle.load(sys.stdin.buffer)))
