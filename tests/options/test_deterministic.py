"""Options that a deterministic engine refuses; test_engine_options.py has their messages."""

import pytest

from jaxspec.options.deterministic import check_deterministic

FINE = {"tensor_parallel_size": 1, "activation_dtype": None, "state_policy": "auto"}


@pytest.mark.parametrize(
    "options", [FINE, FINE | {"state_policy": "snapshot"}], ids=["auto", "snapshot"]
)
def test_what_computes_in_one_order_passes(options):
    check_deterministic(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("activation_dtype", "float8_e4m3fn"),
        ("state_policy", "replay"),
    ],
)
def test_an_error_names_the_rule_what_came_and_the_way_out(name, value):
    with pytest.raises(ValueError, match=f"needs {name}=.*, got {value!r}: .*Change {name}, or"):
        check_deterministic(**FINE | {name: value})
