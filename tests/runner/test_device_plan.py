import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.plan.plan import Program, pack_plan, plan_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.device_plan import DevicePlan

BUCKETS = StepShapes(
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    num_pages=65,
    num_drafts=3,
    decode_rows=(4,),
    prefill_tokens=(8,),
)


@pytest.mark.parametrize("path_length", [0, 5])
@pytest.mark.parametrize("prefill_tokens", [0, 8])
def test_a_plan_reads_on_the_device_as_it_was_packed(prefill_tokens, path_length):
    sizes = dataclasses.replace(BUCKETS, path_length=path_length)
    program = Program(4, prefill_tokens, GREEDY)
    random = np.random.default_rng(0)
    shapes = plan_layout(program, sizes).shapes
    values = {name: random.integers(0, 99, shape, np.int32) for name, shape in shapes.items()}
    packed = jnp.asarray(pack_plan(program, sizes, values))
    plan = DevicePlan.unpack(packed, program, sizes)._asdict()
    assert [name for name, value in plan.items() if value is not None] == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(plan[name], value, err_msg=name)
