"""Arguments of users' logits processors, by slot."""

import dataclasses

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
        )
