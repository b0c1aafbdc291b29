import dataclasses

import numpy as np
import pytest

from jaxspec.options import SpeculativeConfig

GIVEN = {"method": "extract_hidden_states", "layers": [0, 4, 2], "folder": "states"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": None}, r"layers must list 1 to 16 .* got None. For a model of 24"),
        ({"layers": []}, r"got \[\]"),
        ({"layers": 3}, "got 3"),
        ({"layers": "12"}, "got '12'"),
        ({"layers": [1, 2.0]}, r"got \[1, 2.0\]"),
        ({"layers": [True]}, r"got \[True\]"),
        ({"layers": [-1]}, r"from 0 on, got \[-1\]"),
        ({"layers": range(17)}, "must list 1 to 16"),
        ({"layers": [3, 1, 3]}, "must list a layer once, got 3 2 times"),
        ({"folder": None}, "needs a place to save to: give 'folder'"),
        ({"folder": ""}, "folder must be a path"),
        ({"folder": "a\0b"}, "folder must be a path"),
        ({"folder": 3}, "folder must be a text or a Path, got 3"),
        ({"request_id_prefix": 3}, "request_id_prefix must be a text, got 3"),
        ({"num_speculative_tokens": 2}, "must be 0 with the method 'extract_hidden.* got 2. Leave"),
        ({"num_speculative_tokens": -1}, "got -1"),
        ({"num_speculative_tokens": True}, "got True"),
        ({"num_speculative_tokens": "auto"}, "got 'auto'"),
        ({"draft_sample_method": "probabilistic"}, "Probabilistic drafts need a method that"),
        ({"synthetic_acceptance_rates": []}, "are of drafts, and the method"),
        ({"prompt_lookup_max": 3}, r"Unknown keys \['prompt_lookup_max'\]"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({**GIVEN, **given})


@pytest.mark.parametrize("count", [None, 0, 1, np.int8(1)])
def test_it_drafts_nothing_whichever_way_that_is_said(count):
    config = SpeculativeConfig.of({**GIVEN, "num_speculative_tokens": count})
    assert config.num_drafts == 0 and config.draft_buckets == (0,)
    assert config == dataclasses.replace(config) == SpeculativeConfig.of(dataclasses.asdict(config))


def test_layers_are_kept_in_their_order():
    config = SpeculativeConfig.of({**GIVEN, "layers": np.array([3, 0])})
    assert config.options.layers == (3, 0)
    assert hash(config) == hash(SpeculativeConfig.of({**GIVEN, "layers": iter([3, 0])}))
