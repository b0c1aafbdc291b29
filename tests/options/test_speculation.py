import dataclasses
import itertools

import numpy as np
import pytest

from jaxspec.options import SpeculativeConfig
from jaxspec.options.speculation import OTHER_NAMES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle"}, "Unknown speculative method 'eagle'"),
        ({"num_speculative_tokens": 0}, "must be 'auto', None or an integer from 1 to 15, got 0"),
        ({"num_speculative_tokens": 16}, "must be 'auto', None or an integer from 1 to 15, got 16"),
        ({"draft_sample_method": "nucleus"}, "got 'nucleus'"),
        ({"synthetic_acceptance_rates": (0.5, 0.5)}, "one rate in .* for each of the 3 drafts"),
        ({"synthetic_acceptance_rates": (1.5, 0.5, 0.1)}, r"one rate in \[0, 1\]"),
        ({"synthetic_acceptance_rates": (float("nan"),) * 3}, r"one rate in \[0, 1\]"),
        ({"synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "can't rise with the position"),
        (
            {
                "draft_sample_method": "probabilistic",
                "synthetic_acceptance_rates": (0.5, 0.5, 0.5),
            },
            "drop the synthetic rates",
        ),
        ({"draft_head_dtype": "int8"}, "must be 'auto', 'float8_e4m3fn' or None.* got 'int8'"),
        ({"draft_head_dtype": ["auto"]}, r"draft_head_dtype must be .* got \['auto'\]"),
        ({"draft_vocab": 0}, "draft_vocab must be an integer of at least 1, got 0"),
        ({"draft_vocab": True}, "draft_vocab must be an integer of at least 1, got True"),
        ({"draft_vocab": []}, "draft_vocab must be .* a list of token ids .* got a list of none"),
        ({"draft_vocab": [3, -1]}, "a list of token ids from 0 on; got a list with -1"),
        ({"draft_vocab": [3, 1.5]}, "a list of token ids from 0 on; got a list with 1.5"),
        ({"draft_vocab": [True]}, "a list of token ids from 0 on; got a list with True"),
        ({"draft_vocab": "ab"}, "draft_vocab must be an integer of at least 1, got 'ab'"),
        ({"draft_vocab": itertools.count()}, "draft_vocab must list at most 1,048,576 ids, got mo"),
        ({"method": ["mtp"]}, r"Unknown speculative method \['mtp'\]: use one of"),
        ({"method": np.array(["mtp"] * 2)}, "Unknown speculative method array"),
        ({"num_speculative_tokens": True}, "an integer from 1 to 15, got True"),
        ({"num_speculative_tokens": 10**5000}, "from 1 to 15, got an integer of 16,610 bits"),
        ({"draft_sample_method": None}, "draft_sample_method must be .* got None"),
        (
            {"draft_sample_method": "probabilistic", "rejection_sample_method": "blocks"},
            "rejection_sample_method must be 'standard' or 'block', got 'blocks'",
        ),
        ({"rejection_sample_method": ["block"]}, r"rejection_sample_method must .* got \['block"),
        (
            {"rejection_sample_method": "block"},
            "drafts that are drawn, and draft_sample_method is 'greedy'. Pass draft_sample_method="
            "'probabilistic', or keep 'standard': drafts that are not drawn it verifies exactly",
        ),
        ({"synthetic_acceptance_rates": 0.5}, r"needs one rate in \[0, 1\] for each .* got 0.5"),
        ({"synthetic_acceptance_rates": "abc"}, r"needs one rate in \[0, 1\] .* got 'abc'"),
        ({"synthetic_acceptance_rates": [True] * 3}, r"needs one rate in \[0, 1\] .* got \[True"),
        ({"draft_vocab": (3, 7, 3)}, "draft_vocab must list an id once, got id 3 2 times"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, dict) else None,
)
def test_speculation_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(changes)


def test_a_dict_of_the_fields_is_a_config():
    config = SpeculativeConfig.of(
        {"num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.9, 0.5]}
    )
    assert config == SpeculativeConfig(
        num_speculative_tokens=2, synthetic_acceptance_rates=(0.9, 0.5)
    )
    assert SpeculativeConfig.of(config) is config
    assert SpeculativeConfig.of(dataclasses.asdict(config)) == config
    with pytest.raises(ValueError, match=r"Unknown keys \['k'\] .* known are .*'method'"):
        SpeculativeConfig.of({"k": 3})


def test_the_ids_to_draft_are_the_first_or_those_listed():
    def ids(vocab):
        config = SpeculativeConfig.of({"draft_vocab": vocab})
        hash(config)
        assert SpeculativeConfig.of(dataclasses.asdict(config)) == config
        return config.options.draft_ids(8)

    assert ids(None) is None and ids(3) == (0, 1, 2)
    assert ids([5, 0, 7]) == ids(np.array([7, 5, 0])) == (0, 5, 7)
    assert ids(8) is None and ids(range(8)) is None  # all of them is no choice
    for vocab, what in (9, "9 ids"), ([0, 8], "id 8"):
        with pytest.raises(ValueError, match=f"model's vocabulary, ids 0 to 7, got {what}. Leave"):
            ids(vocab)


@pytest.mark.parametrize("value", [3, True, ["mtp"], b"auto", "eagle", np.array(3), {3: 1, "k": 2}])
def test_speculation_is_auto_none_a_method_or_a_dict(value):
    with pytest.raises(ValueError, match="speculati"):
        SpeculativeConfig.read(value)


@pytest.mark.parametrize(("theirs", "own"), OTHER_NAMES.items())
def test_vllms_names_of_methods_are_taken(theirs, own):
    want = SpeculativeConfig(method=own, num_speculative_tokens=2)
    for given in (
        SpeculativeConfig(method=theirs, num_speculative_tokens=2),
        SpeculativeConfig.read({"method": theirs, "num_speculative_tokens": 2}),
    ):
        assert given == want and given.method == own
    assert SpeculativeConfig.read(theirs) == SpeculativeConfig(method=own)


def test_numbers_of_numpy_are_kept_as_pythons():
    python = SpeculativeConfig.of(
        {
            "num_speculative_tokens": 2,
            "draft_vocab": 5,
            "synthetic_acceptance_rates": (0.5, 0.25),
        }
    )
    numpy = SpeculativeConfig.of(
        {
            "num_speculative_tokens": np.int32(2),
            "draft_vocab": np.int64(5),
            "synthetic_acceptance_rates": np.array([0.5, 0.25], np.float32),
        }
    )
    assert numpy == python and repr(numpy) == repr(python) and hash(numpy) == hash(python)


@pytest.mark.parametrize(
    ("asked", "counts"), [(None, (3,)), (2, (2,)), ("auto", (0, 1, 3)), (np.int64(15), (15,))]
)
def test_steps_have_one_number_of_drafts_unless_the_engine_may_choose(asked, counts):
    config = SpeculativeConfig(num_speculative_tokens=asked)
    assert config.draft_buckets == counts and config.num_drafts == counts[-1]


@pytest.mark.parametrize(
    ("asked", "decided"), [(None, ("auto", 3)), (2, (2, 2)), ("auto", ("auto", "auto"))]
)
def test_where_kernels_run_the_engine_chooses_unless_the_user_did(asked, decided):
    config = SpeculativeConfig(num_speculative_tokens=asked)
    found = [config.on_device(has_kernels) for has_kernels in (True, False)]
    assert tuple(each.num_speculative_tokens for each in found) == decided
    assert {each.num_drafts for each in found} == {config.num_drafts}


def test_options_in_a_dict_of_their_own_are_options():
    nested = {"method": "ngram", "options": {"prompt_lookup_min": 2}, "prompt_lookup_max": 3}
    flat = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert SpeculativeConfig.of(nested) == SpeculativeConfig.of(flat)


@pytest.mark.parametrize("options", [{"foo": 1}, {1: 2}])
def test_unknown_options_are_refused_however_they_are_given(options):
    for make in (
        lambda: SpeculativeConfig.of({"method": "mtp", "options": options}),
        lambda: SpeculativeConfig("mtp", options=options),
    ):
        with pytest.raises(ValueError, match="Unknown keys .* known are .*'draft_vocab'"):
            make()
