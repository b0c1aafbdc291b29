"""What tests of kernels run in: Mosaic's interpreter, and the compiler for an H200."""

import pytest
from sm90 import H200


@pytest.fixture
def interpreter(monkeypatch):
    """Parameters of the interpreter, with its race detector; it can read a reference reshaped."""
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


@pytest.fixture(scope="session")
def h200():
    """A device that is not there; programs for it compile, and cannot run."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=H200
    )
    return topology.devices[0]
