"""Whether Mosaic's interpreter, with its race detector, found a race in what it ran last."""


def assert_no_races():
    # Here, because it imports Mosaic.
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    assert not get_races().races_found
