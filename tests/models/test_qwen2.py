"""Qwen2's config.json: biases of attention, and windows in some layers."""

import pytest

from benchmarks.published import MODELS
from jaxspec.models import parse_config
from jaxspec.models.config import FULL_ATTENTION, SLIDING_ATTENTION

PUBLISHED = MODELS["qwen2.5-14b"].config


def test_a_published_configuration_is_read():
    config = parse_config(PUBLISHED)
    assert config.layer_types == (FULL_ATTENTION,) * 48 and config.window is None
    assert config.attention_biases == ("q_proj", "k_proj", "v_proj")
    assert not config.normed_heads and config.head_dim == 128


def test_layers_have_windows_from_a_number_on_or_as_listed():
    slides = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    config = parse_config(PUBLISHED | slides)
    assert config.layer_types == (FULL_ATTENTION,) * 20 + (SLIDING_ATTENTION,) * 28
    assert config.window == 4096
    listed = (SLIDING_ATTENTION, FULL_ATTENTION) * 24
    assert parse_config(PUBLISHED | slides | {"layer_types": list(listed)}).layer_types == listed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "`attention_bias` must be False"),
        ({"layer_types": ["sliding_attention"] * 48}, "`use_sliding_window` must be true"),
        ({"use_sliding_window": True, "max_window_layers": None}, "`max_window_layers`"),
        ({"use_sliding_window": True, "max_window_layers": 9, "sliding_window": 0}, "`sliding_w"),
        ({"layer_types": ["full_attention"] * 9}, "for each of 48 layers; it has 9 entries"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED | changes)
