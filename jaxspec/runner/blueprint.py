"""`Blueprint`: static inputs and argument shapes of an engine's programs, known before weights.

Tracing processes start from it while the weights are read.
"""

import dataclasses
import functools
import logging
import pickle
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cache import CacheSpec, state_policy
from jaxspec.models.base import CheckpointModule, Model, ModelSpec
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.plan import AnyProgram, Program, plan_layout
from jaxspec.plan.step_shapes import StateConfig, StepShapes
from jaxspec.proposers.base import Proposer
from jaxspec.requests.logits_processors import LogitsProcessor
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.memory import MemoryUsage, specs_of
from jaxspec.runner.programs import program_cache, program_key, trace_processes
from jaxspec.runner.programs.trace_processes import EarlyTraces
from jaxspec.runner.step import StepConfig
from jaxspec.runner.trace_worker import TraceRequest
from jaxspec.sampling import Verifier

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Static inputs of an engine's programs, and `jax.ShapeDtypeStruct`s of their arguments.

    Another process can trace the programs from it.
    """

    model_spec: ModelSpec
    config: StepConfig
    memory_usage: MemoryUsage
    weights: tuple[Any, ...]
    state: EngineState
    depends: Any  # constants of the programs: `program_key.words` of `config`, or `config`

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
        drafter: CheckpointModule | None = None,
        group: Group = ALONE,
        processors: tuple[LogitsProcessor, ...] = (),
        routes: bool = False,
        is_deterministic: bool = False,
    ) -> "Blueprint":
        """Return the blueprint of an engine.

        Args:
            model: The model; its parameters may be abstract.
            shapes: Sizes of the programs and of the state.
            proposer: Makes drafts; None for plain decoding.
            dtype: Dtype of the weights and of the computation.
            verifier: Accepts or rejects drafts.
            states: Policy and dtype of recurrent states.
            kv_dtype: Dtype of the KV cache; None means `dtype`.
            drafter: Model or head that the proposer drafts with; its parameters may be abstract.
            group: Devices that share the model; both models have the sizes of one of them.
            processors: Logits processors of the engine.
            routes: Record the experts of each token.
            is_deterministic: Compute each token with the same bits in any step.
        """
        graph, weights = nnx.split(model)
        leaves, tree = jax.tree.flatten(weights)
        memory_usage = MemoryUsage.of(
            model,
            proposer,
            drafter,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            states=states,
            group=group,
            processors=processors,
            routes=routes,
        )
        config = StepConfig(
            shapes=shapes,
            model=graph,
            weights=tree,
            proposer=proposer,
            verifier=verifier,
            specs=memory_usage.specs,
            states=state_policy(states),
            group=group,
            mailbox=memory_usage.mailbox,
            # GPUs multiply float32 in TF32 by default.
            matmul_precision="highest" if dtype == jnp.float32 else None,
            is_deterministic=is_deterministic,
        )
        return Blueprint(
            model_spec=ModelSpec.of(model, dtype),
            config=config,
            memory_usage=memory_usage,
            weights=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            state=jax.eval_shape(functools.partial(memory_usage.empty_state, shapes)),
            depends=program_key.words(config) or config,
        )

    def whole_specs(self) -> tuple[CacheSpec, ...]:
        """Return the specs of the pools as on a single device."""
        proposer = self.config.proposer
        model: Model = self.model_spec.whole.model()
        return specs_of(model, proposer and proposer.whole, self.memory_usage.options)

    def fingerprint(self, program: AnyProgram) -> str | None:
        return program_key.fingerprint(self._args(program), (self.depends, program))

    def request(self, program: AnyProgram) -> bytes | None:
        """Return a pickled `TraceRequest` for the program, or None if it can't be pickled."""
        args, depends = self._args(program), (self.depends, program)
        try:
            return pickle.dumps(
                TraceRequest.of(self.model_spec, self.config, program, args, depends)
            )
        except Exception as error:  # for example, a user's proposer that can't be pickled
            _log.info("no other process traces a program: %r", error)
            return None

    def trace_early(self, programs: Iterable[AnyProgram]) -> EarlyTraces:
        """Start processes that trace the steps among `programs` that the program cache lacks.

        None are started where that would not save time (`trace_processes.num_processes`).
        """
        keys = {p: self.fingerprint(p) for p in programs if isinstance(p, Program)}
        lacking = {p: key for p, key in keys.items() if key and program_cache.lacks(key)}
        if not trace_processes.num_processes(len(lacking)):
            lacking = {}
        requests = {key: self.request(program) for program, key in lacking.items()}
        return EarlyTraces({key: each for key, each in requests.items() if each is not None})

    def _args(self, program: AnyProgram) -> tuple[Any, ...]:
        size = plan_layout(program, self.config.shapes).size
        packed = jax.ShapeDtypeStruct((size,), jnp.int32)
        shared = self.weights, self.memory_usage.step_args, self.state.of(program)
        return *self.config.group.like(shared), packed
