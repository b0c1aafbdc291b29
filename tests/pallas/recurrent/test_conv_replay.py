"""Steps from the projection on: the two ops they are made of, and kernels equal references."""

import functools

import gdn_replays
import jax
import jax.numpy as jnp
import mamba2_replays
import numpy as np
import pytest
from recurrences import GDN, MAMBA2

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch

OPTIMIZED = True  # as for a user

STEP = {"gdn": gdn_replays, "mamba2": mamba2_replays}
both = pytest.mark.parametrize(
    ("family", "shape"),
    [(GDN, GdnShape(2, 4, 8, 8)), (MAMBA2, Mamba2Shape(4, 2, head_dim=5, state_dim=8))],
    ids=str,
)


@pytest.mark.soak
@pytest.mark.few(1)
@both
def test_the_op_is_what_its_parts_are(family, shape):
    """Equal to the bit as one program each; nearly so with each part as a program."""
    step = STEP[family.name]
    operands = step.conv_case(shape, jnp.float32, jnp.float32, 3)
    got = step.conv_replay(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, step.conv_reference(*operands))
    *projection, states, ring, layer, rows = operands
    tokens, conv = family.inputs.reference(*projection, layer, rows)
    out, states, ring = family.replay.reference(tokens, states, ring, layer, rows)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        got,
        (out, conv, states, ring),
    )


@both
def test_errors_are_those_of_its_parts(family, shape):
    step, channels = STEP[family.name], shape.conv_dim
    operands = step.conv_case(shape, jnp.float32, jnp.float32, 3)
    x, params, conv, states, ring, *where = operands
    with pytest.raises(ValueError, match="num_drafts >= 2"):
        step.conv_replay(x, params, conv[:, :, 1:], states, ring, *where)
    with pytest.raises(ValueError, match=f"this one has {channels}. Pass the whole projection"):
        step.conv_replay(x[..., :channels], params, conv, states, ring, *where)
    with pytest.raises(ValueError, match=f"Build it with at least {ring.num_rows}"):
        shorter = jax.tree.map(lambda pool: pool[:, :, 1:], ring)
        step.conv_replay(x, params, conv, states, shorter, *where)


BFLOAT16, FLOAT16, FLOAT32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.mark.parametrize(
    ("family", "shape", "x_dtype", "dtype", "width", "case", "options"),
    [
        *(
            (GDN, shape, x_dtype, dtype, width, case, {"splits": splits})
            for shape, x_dtype, dtype, width, case, splits in [
                (GdnShape(1, 2), BFLOAT16, FLOAT32, 4, {"window": 8, "normed": BFLOAT16}, 1),
                (GdnShape(2, 4), FLOAT32, FLOAT32, 1, {"spare": 3}, 4),
                (GdnShape(1, 2), FLOAT16, FLOAT16, 3, {"kernel": 3, "spare": 1}, 2),
                (GdnShape(1, 2), BFLOAT16, FLOAT16, 1, {"normed": BFLOAT16}, 1),
                (GdnShape(2, 2, 64, 64), FLOAT32, BFLOAT16, 4, {"normed": FLOAT32}, 1),
                (GdnShape(1, 1, 128, 64), BFLOAT16, FLOAT32, 8, {"window": 20, "kernel": 2}, 2),
            ]
        ),
        *(
            (MAMBA2, shape, x_dtype, dtype, width, case, {"block_heads": block_heads})
            for shape, x_dtype, dtype, width, case in [
                (Mamba2Shape(4, 2), BFLOAT16, FLOAT32, 4, {}),
                (Mamba2Shape(4, 1), FLOAT32, FLOAT32, 1, {"spare": 3}),
                (Mamba2Shape(2, 1, 64, 64), BFLOAT16, FLOAT16, 3, {"kernel": 3, "spare": 1}),
                (Mamba2Shape(2, 1, 128, 64), FLOAT16, BFLOAT16, 8, {"kernel": 2}),
            ]
            for block_heads in (1, 2)
        ),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, family, shape, x_dtype, dtype, width, case, options
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    step = STEP[family.name]
    run = functools.partial(step.conv_kernel, interpret=interpreter, **options)
    step.check_conv(run, shape, x_dtype, dtype, width, **case)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize(
    ("family", "shape", "width", "case"),
    [
        *(
            (GDN, shape, width, case)
            for shape in (*GDN.published.values(), GdnShape(2, 6), GdnShape(2, 4, 64, 64))
            for width in range(1, 9)
            for case in ({}, {"normed": BFLOAT16})
            if not case or shape.value_heads >= 9  # with one block per head
        ),
        *(
            (MAMBA2, shape, width, {})
            for shape in (*MAMBA2.published.values(), Mamba2Shape(4, 2, 128, 64))
            for width in (1, 2, 3, 4, 8)
        ),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(family, shape, width, case, dtype):
    dispatch._chosen.clear()
    step = STEP[family.name]
    for x_dtype in (BFLOAT16, FLOAT32):
        step.check_conv(step.conv_replay, shape, x_dtype, dtype, width, **case)
    assert dispatch.implementations() == {f"{family.name}_conv_replay": ("kernel",)}
