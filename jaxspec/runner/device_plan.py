"""`DevicePlan`: typed view of the packed plan of a step, for the device."""

from typing import NamedTuple

from jaxtyping import Array, Int

from jaxspec.plan.plan import PlacesRows, plan_layout
from jaxspec.plan.step_shapes import StepShapes


class DevicePlan(NamedTuple):
    """Fields of `jaxspec.plan.plan.plan_layout`, which documents them. All are int32."""

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
    # None unless the host makes the drafts.
    paths: Int[Array, "batch path"] | None = None
    path_from: Int[Array, " batch"] | None = None
    path_match: Int[Array, " batch"] | None = None

    @staticmethod
    def unpack(
        packed: Int[Array, " plan"], program: PlacesRows, shapes: StepShapes
    ) -> "DevicePlan":
        return DevicePlan(**plan_layout(program, shapes).unpack(packed))
