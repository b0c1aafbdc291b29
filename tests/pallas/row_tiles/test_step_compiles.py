"""A deterministic step compiles for an H200 that is not there: kernels, and all state in place."""

import re

import jax
import pytest
from blueprints import ROWS, blueprint_of, compiled_in_place

from jaxspec import device
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import EVERYTHING


@pytest.mark.mosaic
@pytest.mark.soak
def test_the_donated_state_is_written_in_place(h200, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "default_device", lambda: h200)
    blueprint = blueprint_of(tmp_path, "qwen3.5-0.8b", drafts=3, deterministic=True)
    program = Program(ROWS, 0, EVERYTHING, 1, 3)
    text, state = compiled_in_place(h200, blueprint, program)
    for leaf in jax.tree.leaves(state.pools):
        shape = ",".join(map(str, leaf.shape))
        assert not re.search(rf"\[{shape}\]\S* copy\(", text)
