"""The head drafts, inside the engine, what the reference implementation's head drafts."""

import numpy as np
import pytest
from harness import FIXTURES, Harness
from safetensors import safe_open

from jaxspec.request import SamplingParams


@pytest.mark.parametrize("chunk", [None, 33])
@pytest.mark.parametrize("fixture", ["qwen3_5", "qwen3_5_tied"])
def test_the_first_drafts_are_the_references(fixture, chunk):
    """Four recursive drafts after the prompt, the token after each chunk taken from the plan."""
    with safe_open(FIXTURES / fixture / "reference.safetensors", "np") as file:
        prompt, drafts = (file.get_tensor(n).tolist() for n in ("prompt_ids", "mtp_draft_ids"))
    engine = Harness(fixture, drafts=len(drafts), chunk=chunk, max_in_flight=0)
    request = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=20))[0]
    while not request.output:
        engine.step()
    rows = engine.runner.state.rows
    assert np.asarray(rows.drafts)[0].tolist() == drafts
    assert int(rows.num_drafts[0]) == len(drafts)
