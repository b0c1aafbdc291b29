"""Programs of structured outputs compile for an H200 that is not there: all state in place."""

import re

import jax
import pytest
from blueprints import ROWS, blueprint_of, compiled_in_place

from jaxspec import device
from jaxspec.plan.plan import AUTOMATON, MASKS, ForwardPass, Program
from jaxspec.requests.sampling_features import EVERYTHING

DRAFTS = 3
HALF = ForwardPass(ROWS, DRAFTS)
WHOLE = Program(ROWS, 0, EVERYTHING, 1, DRAFTS)


@pytest.mark.mosaic
@pytest.mark.parametrize("program", [MASKS, AUTOMATON, WHOLE, HALF, HALF.rest])
def test_the_donated_state_is_written_in_place(h200, program, monkeypatch, tmp_path):
    """With 248,320 ids."""
    monkeypatch.setattr(device, "default_device", lambda: h200)
    blueprint = blueprint_of(tmp_path, "qwen3.5-9b", drafts=DRAFTS)
    text, state = compiled_in_place(h200, blueprint, program)
    held = jax.tree.leaves(state.tables) or jax.tree.leaves(state.forward)
    largest = ",".join(map(str, max(held, key=lambda leaf: leaf.size).shape))
    assert not re.search(rf"\[{largest}\]\S* copy\(", text)
