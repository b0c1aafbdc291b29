"""Arguments of users' logits processors, and the newest tokens of their requests, by slot."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.plan.processor_plan import processor_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.logits_processors import LogitsProcessor


@flax.struct.dataclass
class ProcessorTables:
    """Arguments of each slot. As in `BiasTables`, rows without tables read slot 0, which uses none.

    The processors are static: a program with these tables is compiled for them.
    """

    used: Int[Array, " slots"]  # one bit per processor
    params: Float[Array, "slots params"]
    recent: Int[Array, "slots length"]  # newest tokens; token `i` is at `i % length`
    processors: tuple[LogitsProcessor, ...] = flax.struct.field(pytree_node=False)

    @staticmethod
    def empty(
        shapes: StepShapes, processors: tuple[LogitsProcessor, ...]
    ) -> "ProcessorTables | None":
        """Create tables in which no slot uses a processor; None without processors."""
        if not processors:
            return None
        slots = shapes.num_slots
        return ProcessorTables(
            used=jnp.zeros(slots, jnp.int32),
            params=jnp.zeros((slots, shapes.processor_params), jnp.float32),
            recent=jnp.full((slots, shapes.processor_tokens), NO_TOKEN, jnp.int32),
            processors=processors,
        )

    def with_slot(self, packed: Int[Array, " plan"], shapes: StepShapes) -> "ProcessorTables":
        """Return tables with one slot written from a packed plan (`plan.processor_plan`)."""
        plan = processor_layout(shapes).unpack(packed)
        where = jnp.where(plan["slot"] > 0, plan["slot"], len(self.used))
        return dataclasses.replace(
            self,
            used=self.used.at[where].set(plan["used"], mode="drop"),
            params=self.params.at[where].set(plan["params"], mode="drop"),
            recent=self.recent.at[where].set(plan["recent"], mode="drop"),
        )

    def with_tokens(
        self, slots: Int[Array, " n"], tokens: Int[Array, " n"], indices: Int[Array, " n"]
    ) -> "ProcessorTables":
        """Return tables with newer tokens, as `BiasTables.with_tokens` does."""
        where = jnp.where(slots > 0, slots, len(self.recent))
        column = indices % self.recent.shape[1]
        return dataclasses.replace(
            self, recent=self.recent.at[where, column].set(tokens, mode="drop")
        )
