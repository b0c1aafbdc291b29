import pytest

from jaxspec.options import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 4}, (4, 4)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 16}, (1, 16)),
    ],
)
def test_one_bound_sets_both_as_in_vllm(given, bounds):
    options = SpeculativeConfig.of({"method": "ngram", **given}).options
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == bounds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of at least 1, got 0"),
        ({"prompt_lookup_max": 17}, "must be at most 16, got 17"),
        ({"prompt_lookup_max": True}, "must be an integer of at least 1, got True"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "must not exceed .* got 4 > 3"),
        ({"draft_vocab": 9}, r"Unknown keys \['draft_vocab'\] .* known are .*'prompt_lookup_max'"),
        ({"draft_sample_method": "probabilistic"}, "one of .*'mtp'.* got 'ngram'.*leave"),
    ],
)
def test_bounds_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of({"method": "ngram", **given})


def test_a_methods_name_alone_is_a_config():
    assert SpeculativeConfig.read("ngram") == SpeculativeConfig.of({"method": "ngram"})
    assert SpeculativeConfig.read("ngram").num_drafts == 4
