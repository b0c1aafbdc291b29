"""Worker process that traces one program, started by `trace_processes.py`.

Standard input has a pickled `TraceRequest`, trusted because only the parent process can write it.
The answer is the content of the program's file in the program cache.
"""

import dataclasses
import os
import pickle
import sys
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxspec import device
from jaxspec.models.base import ModelSpec
from jaxspec.plan.plan import AnyProgram
from jaxspec.runner.programs import program_cache, program_key
from jaxspec.runner.step import StepConfig, jitted_step


class TraceRequest(NamedTuple):
    """Picklable inputs from which another process can trace a program."""

    model_spec: ModelSpec
    config: StepConfig  # without the model and its weights, which can't be pickled
    program: AnyProgram
    arguments: tuple[Any, ...]  # shapes and dtypes of the step's arguments after the weights
    target: device.StandIn
    platform: str  # platform name for lowering
    settings: dict[str, Any]  # JAX's settings
    fingerprint: str | None  # `program_key.fingerprint` of the program

    @staticmethod
    def of(
        model_spec: ModelSpec,
        config: StepConfig,
        program: AnyProgram,
        args: tuple[Any, ...],
        closed_over: Any,
    ) -> "TraceRequest":
        """Create the request for a program that this process will call with `args`."""
        _, *others = args
        return TraceRequest(
            model_spec=model_spec,
            config=dataclasses.replace(config, model=None, weights=None),
            program=program,
            arguments=jax.tree.map(program_key.described, tuple(others)),
            target=device.StandIn.of(device.default_device()),
            platform=program_cache.platform(),
            settings=program_key.settings(),
            fingerprint=program_key.fingerprint(args, closed_over),
        )


def trace(request: TraceRequest) -> bytes:
    """Trace and export the program (`program_cache.traced`).

    Raises:
        ValueError: the fingerprint differs, so that this process would trace another program.
    """
    for name, value in request.settings.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    device.trace_for(request.target)
    graph, weights = nnx.split(request.model_spec.model())
    leaves, tree = jax.tree.flatten(weights)
    config = dataclasses.replace(request.config, model=graph, weights=tree)
    args = config.group.like(tuple(leaves)), *request.arguments
    depends = program_key.words(config), request.program
    if program_key.fingerprint(args, depends) != request.fingerprint:
        raise ValueError(
            "A process must trace the program that it was asked for, and would make another of it."
        )
    return program_cache.traced(jitted_step(config, request.program), args, request.platform)


def main(answer: int) -> None:
    """Answer one request on the file descriptor `answer`, without using the GPU."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_platform_name", "")
    with os.fdopen(answer, "wb") as file:
        file.write(trace(pickle.load(sys.stdin.buffer)))
