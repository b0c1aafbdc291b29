"""DevicePlan: the packed plan of a step, typed, as the device reads it."""

from typing import NamedTuple

from jaxtyping import Array, Int

from jaxspec.config import StepShapes
from jaxspec.plan import Program, plan_layout


class DevicePlan(NamedTuple):
    """The fields of `jaxspec.plan.plan_layout`, which says what they hold. All are int32."""

    prev_positions: Int[Array, " batch"]
    num_decode: Int[Array, ""]
    new_row_index: Int[Array, " new"]
    new_rows: Int[Array, "new fields"]
    append_slots: Int[Array, " appends"]
    append_indices: Int[Array, " appends"]
    append_pages: Int[Array, " appends"]
    prefill_tokens: Int[Array, " prefill_tokens"]
    prefill_lens: Int[Array, " seqs"]
    next_prefill_tokens: Int[Array, " seqs"]
    source_slots: Int[Array, " moves"]
    target_slots: Int[Array, " moves"]
    source_pages: Int[Array, " moves"]
    target_pages: Int[Array, " moves"]
    target_tables: Int[Array, "moves pages"]
    # Engines that draft on the device alone have none of these.
    paths: Int[Array, "batch path"] | None = None
    path_from: Int[Array, " batch"] | None = None
    path_match: Int[Array, " batch"] | None = None

    @staticmethod
    def unpack(packed: Int[Array, " plan"], program: Program, shapes: StepShapes) -> "DevicePlan":
        """Views of `StepPlan.packed`."""
        return DevicePlan(**plan_layout(program, shapes).unpack(packed))
