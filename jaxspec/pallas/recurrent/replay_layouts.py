"""Register layouts of `gdn_replay_kernel` and `mamba2_replay_kernel`."""

from jax.experimental.pallas import mosaic_gpu as plgpu


def rows_layout(values, lanes, vector, columns=None):
    """Register layout of a matrix with a row a value, over `lanes`: neighbours have others.

    `columns=1`: of a matrix of one column, which these lanes then share.
    """
    width = columns or lanes * vector
    between = plgpu.Replicated(lanes) if columns == 1 else -3
    return plgpu.Layout.TILED(
        plgpu.Tiling(((values, width), (values // 4, vector))),
        warp_dims=(-4,),
        lane_dims=(-2,) if lanes == 1 else (between, -2),
        vector_dim=-1,
    )


def square_layout(itemsize):
    """Register layout of a state: of every 32 values a thread has one, and a quarter of its keys.

    32 bytes of each 128, in two vectors: with the swizzle the 8 threads that are served at once
    find them in different banks.
    """
    vector = 16 // itemsize
    tiles = (32, 8 * vector), (8, 8 * vector), (2 * vector,), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1
    )


def square_column_layout():
    """Of a matrix of one column, which has what a sum over such a state's keys gives."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((32, 1), (8, 1))),
        warp_dims=(-4,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def factor_layout(itemsize):
    """Of keys, four factors, each a warp's, and their elements: 8 lanes, 128 bytes."""
    vector = 16 // itemsize
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, 4, 8 * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-4, -2),
        vector_dim=-1,
    )


def quarters_layout():
    """Of a float32 state in quarters of its keys, a warp's each: a lane has a value of every 32."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, 32, 4),)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
