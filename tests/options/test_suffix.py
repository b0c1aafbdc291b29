import pytest

from jaxspec.options import SpeculativeConfig


def test_the_defaults_are_those_of_vllm():
    config = SpeculativeConfig.read("suffix")
    assert vars(config.options) == {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    assert config.num_drafts == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "max_tree_depth must be an integer of at least 1"),
        ({"suffix_decoding_max_tree_depth": 257}, "must be at most 256, got 257"),
        ({"suffix_decoding_max_cached_requests": -1}, "must be an integer of at least 0, got -1"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, "a number from 0 to 64, got nan"),
        ({"suffix_decoding_max_spec_factor": "1"}, "max_spec_factor must be a number .* got '1'"),
        ({"suffix_decoding_min_token_prob": 1.5}, "must be a number from 0 to 1, got 1.5"),
        ({"suffix_decoding_min_token_prob": True}, "min_token_prob must be a number"),
        ({"prompt_lookup_max": 3}, "Unknown keys .* known are .*'suffix_decoding_max_tree_depth'"),
        ({"draft_sample_method": "probabilistic"}, "one of .*'mtp'.* got 'suffix'.*leave"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({"method": "suffix", **given})
