"""Arguments that commands share; more of them in test_messages.py and tests/commands."""

import pytest

from jaxspec.options.arguments import (
    CommandParser,
    add_engine_options,
    add_model,
    add_other_engine_options,
    add_speculation,
    engine_options,
)


def read(*words, **defaults):
    parser = CommandParser()
    add_model(parser)
    add_engine_options(parser, "max_num_seqs", "dtype")
    add_speculation(parser)
    add_other_engine_options(parser)
    return engine_options(parser.parse_args(words), **defaults)


def test_only_what_was_said_is_passed_on_and_it_wins_over_a_commands_own_default():
    assert read() == {"model": None, "speculative_config": "auto"}
    assert read(max_num_seqs=1)["max_num_seqs"] == 1
    assert read("--max-num-seqs", "2", max_num_seqs=1)["max_num_seqs"] == 2
    assert read("--max-num-seqs", "8", max_num_seqs=1)["max_num_seqs"] == 8  # `LLM`'s default
    others = ["--engine-options", '{"max_num_seqs": 3, "speculative_config": null}']
    found = read("m", *others, max_num_seqs=1)
    assert found == {"model": "m", "speculative_config": None, "max_num_seqs": 3}
    assert read("a/b", "--engine-options", '{"revision": "v1"}')["revision"] == "v1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{", "--engine-options must be a JSON object, and this is no JSON: Expecting property"),
        ("[1]", r"--engine-options must be a JSON object of options, without the model, got \[1\]"),
        ('{"model": "m"}', "--engine-options must be a JSON object of options, without the model"),
        ('{"dtipe": 1}', "In --engine-options: LLM has no option 'dtipe'; the nearest is 'dtype'"),
        ('{"dtype": "int4"}', "dtype must be 'float32', 'bfloat16' or 'auto', got 'int4'"),
        ('{"max_num_seqs": 3}', "max_num_seqs must be given once, got it both in --engine-options"),
    ],
)
def test_other_options_are_checked_by_name_and_value(words, message):
    with pytest.raises(ValueError, match=message):
        read("--max-num-seqs", "2", "--engine-options", words)
