"""rotation: the scaling of a file's factors, and files with others."""

import json

import numpy as np
import pytest
from gguf_files import llama3_factors, write_gguf

from jaxspec.models.gguf.fields import read_fields


def entries(tmp_path, **options):
    return read_fields(write_gguf("llama", tmp_path / "x.gguf", **options)).entries


def rope_of(fixture_folder, positions, factor, theta):
    config = json.loads((fixture_folder("llama") / "config.json").read_text())
    rope = {"factor": factor, "original_max_position_embeddings": positions, "rope_theta": theta}
    return config | {"rope_parameters": config["rope_parameters"] | rope}


# At 131,072 positions and the smaller base no pair of channels turns slowly enough to tell.
CONTEXTS = [(positions, 500000.0) for positions in (32, 64, 333, 8192, 131072)]
CONTEXTS += [(positions, 10000.0) for positions in (32, 64, 333, 8192)]


@pytest.mark.parametrize(("positions", "theta"), CONTEXTS)
@pytest.mark.parametrize("factor", [2.0, 8.0, 32.0])
def test_the_scaling_is_found_in_its_factors(positions, factor, theta, tmp_path, fixture_folder):
    """Whatever is found divides each frequency by what the file says."""
    config = rope_of(fixture_folder, positions, factor, theta)
    factors = llama3_factors(config)
    assert factors.max() == factor and factors.min() == 1
    found = entries(
        tmp_path,
        change=lambda held: held.update({"rope_freqs.weight": factors}),
        entries={"llama.rope.freq_base": theta},
    )["rope_scaling"]
    again = config | {"rope_parameters": found | {"rope_theta": theta}}
    np.testing.assert_allclose(llama3_factors(again), factors, rtol=1e-4)
    assert found["factor"] == factor


@pytest.mark.parametrize(
    ("factors", "fault"),
    [
        (np.linspace(1, 8, 16, dtype=np.float32), "has other values"),
        (np.full(16, np.nan, np.float32), "has other values"),
        (np.ones(16, np.float32), "has other values"),
        (np.ones(8, np.float32), r"has the shape \[8\] in F32"),
    ],
)
def test_other_factors_are_refused(factors, fault, tmp_path):
    with pytest.raises(ValueError, match=f"rope_freqs.weight` must be 16 factors.*{fault}"):
        entries(tmp_path, change=lambda held: held.update({"rope_freqs.weight": factors}))
