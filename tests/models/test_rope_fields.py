"""The rotation in every published spelling, and refusals that name the field."""

import pytest

from jaxspec.models.config import Llama3Scaling, RopeConfig, YarnScaling
from jaxspec.models.kinds import Block
from jaxspec.models.rope_fields import read_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GPT_OSS = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def read(**fields):
    return read_rope(Block(fields), 64, 1.0)


def scaled(**changes):
    return {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, **changes}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 10000}, RopeConfig(1e4, 64)),
        ({"rope_theta": 1e4, "rope_scaling": None}, RopeConfig(1e4, 64)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, RopeConfig(1e4, 64)),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, RopeConfig(1e4, 16)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "mrope"}}, RopeConfig(1e4, 64)),
        ({"rope_parameters": scaled()}, RopeConfig(5e5, 64, SCALING)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, 64, SCALING),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            RopeConfig(5e5, 64, SCALING),
        ),
        (
            {"rope_parameters": scaled(), "rope_scaling": scaled(type="llama3"), "rope_theta": 5e5},
            RopeConfig(5e5, 64, SCALING),
        ),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, RopeConfig(1e6, 64, YarnScaling(4.0, 32768))),
        (
            {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6}},
            RopeConfig(1e6, 64, YarnScaling(4.0, 32768)),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": DEEPSEEK},
            RopeConfig(1e4, 64, YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {**GPT_OSS, "attention_factor": 1.25}},
            RopeConfig(1e4, 64, YarnScaling(4.0, 32768, truncate=False, attention_factor=1.25)),
        ),
    ],
)
def test_every_spelling_is_read(fields, rope):
    assert read(**fields) == rope


def test_what_a_family_assumes_counts_where_config_json_is_silent():
    assert read_rope(Block({}), 64, 0.5, 1e4) == RopeConfig(1e4, 32)
    said = Block({"rope_theta": 2e4, "partial_rotary_factor": 1})
    assert read_rope(said, 64, 0.5, 1e4) == RopeConfig(2e4, 64)
    scaling = {"rope_type": "llama3", **LLAMA3}
    for fields, default in (({}, None), ({"rope_scaling": scaling}, 1e4)):
        with pytest.raises(ValueError, match=r"config\.json must give `rope_theta`"):
            read_rope(Block(fields), 64, 0.5, default)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "proportional"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_is_not_implemented_is_refused_by_name(name, kind, spelling):
    message = (
        f"must be 'default', 'llama3' or 'yarn', got '{kind}', .*; else use another checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        read(**{name: {spelling: kind, "factor": 2.0}, "rope_theta": 1e4})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "`rope_scaling.factor` must be absent"),
        ({"rope_scaling": {"rope_theta": 5e5}}, r"one `rope_theta`, and gives \[10000.0, 500000"),
        (
            {"rope_scaling": {"type": "default", "rope_type": "llama3", **LLAMA3}},
            r"one rope type, and gives \['default', 'llama3'\]",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": scaled(rope_theta=1e4)},
            r"one rope type, and gives \['default', 'llama3'\]",
        ),
        (
            {
                "rope_parameters": scaled(rope_theta=1e4),
                "rope_scaling": scaled(rope_theta=1e4, factor=4),
            },
            r"one `factor`, and gives \[4, 8.0\]",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": YARN},
            r"one rope type, and gives \['llama3', 'yarn'\]",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "`beta_fast` must be at least `beta_slow`"),
        ({"partial_rotary_factor": 0.02}, "rotates 1 channels; it must be an even number in 2..64"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        read(rope_theta=1e4, **fields)


@pytest.mark.parametrize("name", LLAMA3)
@pytest.mark.parametrize("value", [None, "8", True, 0, -1.0, float("nan")])
def test_each_number_of_a_scaling_is_needed_and_judged(name, value):
    with pytest.raises(ValueError, match=rf"`rope_scaling\.{name}`"):
        read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3, name: value})


@pytest.mark.parametrize("high", [0.5, 1])
def test_slow_and_fast_turns_are_apart(high):
    with pytest.raises(ValueError, match="`low_freq_factor` must be below `high_freq_factor`, got"):
        read(rope_parameters=scaled(high_freq_factor=high))


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [None, "8", True, 0, -1.0, float("nan"), float("inf")])
def test_each_size_of_yarn_is_needed_and_judged(name, value):
    with pytest.raises(ValueError, match=rf"`rope_scaling\.{name}`"):
        read(rope_theta=1e4, rope_scaling={**YARN, name: value})


@pytest.mark.parametrize(
    "name", ["beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"]
)
@pytest.mark.parametrize("value", ["8", [], -1.0, float("nan"), 1e9])
def test_each_option_of_yarn_is_judged(name, value):
    with pytest.raises(ValueError, match=rf"`rope_scaling\.{name}`"):
        read(rope_theta=1e4, rope_scaling={**YARN, name: value})
    assert read(rope_theta=1e4, rope_scaling={**YARN, name: None}).scaling == YarnScaling(4, 32768)


def test_yarn_extends_the_context_that_a_model_may_have():
    assert read(rope_theta=1e4, rope_scaling=YARN).extended_length == 131072
    assert read(rope_theta=1e4).extended_length == 0
