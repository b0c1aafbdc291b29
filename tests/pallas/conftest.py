"""Mosaic's interpreter, as tests of kernels want it."""

import jax
import pytest


@pytest.fixture
def interpreter(monkeypatch):
    """With its race detector, and taught to read a reference reshaped."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic's interpreter needs jax 0.11")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state.types import ReshapeTransform
    from jax.experimental.pallas import mosaic_gpu as plgpu

    get = gpu_callbacks._get

    def get_reshaped(token, mesh_location, thread, key, transforms, *others, **named):
        last = transforms[-1] if transforms else None
        if not isinstance(last, ReshapeTransform):
            return get(token, mesh_location, thread, key, transforms, *others, **named)
        found = get(token, mesh_location, thread, key, transforms[:-1], *others, **named)
        token, values = found
        return token, values.reshape(last.shape)

    monkeypatch.setattr(gpu_callbacks, "_get", get_reshaped)
    return plgpu.InterpretGPUParams(detect_races=True)
