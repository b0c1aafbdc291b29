"""Blueprint: an engine's programs and the shapes of their arguments, before there are weights."""

import dataclasses
import functools
import logging
import pickle
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import state_policy
from jaxspec.config import StateConfig, StepShapes
from jaxspec.models.base import Model, ModelRecipe, Published
from jaxspec.plan import Program, plan_layout
from jaxspec.proposers.base import Proposer
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.memory import Holdings
from jaxspec.runner.programs import program_cache, program_key, trace_processes
from jaxspec.runner.programs.trace_processes import EarlyTraces
from jaxspec.runner.step import StepConfig
from jaxspec.runner.trace_worker import TraceRequest
from jaxspec.sampling import Verifier

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The static inputs of an engine's programs, and the shapes of the arrays that they take.

    Another process can trace the programs from it. Arrays are shapes and dtypes
    (`jax.ShapeDtypeStruct`).
    """

    recipe: ModelRecipe
    config: StepConfig
    holdings: Holdings
    weights: tuple[Any, ...]
    state: EngineState
    depends: Any  # what the programs close over: its `program_key.words`, or else `config`

    @staticmethod
    def of(
        model: Model,
        shapes: StepShapes,
        proposer: Proposer | None,
        *,
        dtype: jnp.dtype,
        verifier: Verifier,
        states: StateConfig,
        kv_dtype: jnp.dtype | None = None,
        drafter: Published | None = None,
    ) -> "Blueprint":
        """Return the blueprint of an engine.

        Args:
            model: The model; its parameters need no values.
            shapes: The sizes of programs and of the state.
            proposer: Makes drafts; None for plain decoding.
            dtype: Of the weights and of what is computed.
            verifier: Accepts drafts.
            states: How recurrent states are kept.
            kv_dtype: Of the cached keys and values; None for `dtype`.
            drafter: The checkpoint that the proposer was made for; it needs no values either.
        """
        graph, weights = nnx.split(model)
        leaves, tree = jax.tree.flatten(weights)
        holdings = Holdings.of(
            model,
            proposer,
            drafter,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            states=states,
        )
        config = StepConfig(
            shapes=shapes,
            model=graph,
            weights=tree,
            proposer=proposer,
            verifier=verifier,
            specs=holdings.specs,
            states=state_policy(states),
            # A GPU would otherwise multiply float32 in TF32.
            matmul_precision="highest" if dtype == jnp.float32 else None,
        )
        return Blueprint(
            recipe=ModelRecipe.of(model, dtype),
            config=config,
            holdings=holdings,
            weights=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            state=jax.eval_shape(functools.partial(holdings.empty_state, shapes)),
            depends=program_key.words(config) or config,
        )

    def fingerprint(self, program: Program) -> str | None:
        """Return the program's `program_key.fingerprint`."""
        return program_key.fingerprint(self._args(program), (self.depends, program))

    def request(self, program: Program) -> bytes | None:
        """Return a pickled `TraceRequest` for the program, or None if it can't be pickled."""
        args, depends = self._args(program), (self.depends, program)
        try:
            return pickle.dumps(TraceRequest.of(self.recipe, self.config, program, args, depends))
        except Exception as error:  # a proposer of the user's, say, that can't be pickled
            _log.info("no other process traces a program: %r", error)
            return None

    def trace_early(self, programs: Iterable[Program]) -> EarlyTraces:
        """Let processes trace the steps among `programs` that no earlier process has kept.

        Where processes are not worth their start (`num_processes`) they trace none.
        """
        keys = {p: self.fingerprint(p) for p in programs if p.num_steps}
        lacking = {p: key for p, key in keys.items() if key and program_cache.lacks(key)}
        if not trace_processes.num_processes(len(lacking)):
            lacking = {}
        requests = {key: self.request(program) for program, key in lacking.items()}
        return EarlyTraces({key: each for key, each in requests.items() if each is not None})

    def _args(self, program: Program) -> tuple[Any, ...]:
        size = plan_layout(program, self.config.shapes).size
        packed = jax.ShapeDtypeStruct((size,), jnp.int32)
        return self.weights, self.holdings.tables, self.state.of(program), packed
