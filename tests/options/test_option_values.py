"""Values of options: each comes out as the type of its field says, or is refused by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from walks import SOFT

from jaxspec.options.engine_options import option
from jaxspec.options.option_values import read
from jaxspec.requests.logits_processors import AnyProcessor


@dataclasses.dataclass
class Options:
    word: Literal["on", "off"] = option("on", "a word")
    maybe: Literal["on"] | None = option(None, "a word or nothing", none="what the day brings")
    count: int | Literal["auto"] = option("auto", "a size or a word")
    bits: int = option(0, "any integer", least=None)
    share: float | None = option(None, "a number", none="all")
    flag: bool | None = option(None, "yes or no", none="it depends")
    sizes: Sequence[int] | None = option(None, "sizes", none="many")
    place: str | Path | None = option(None, "a path", none="here")
    entries: Mapping[str, Any] | None = option(None, "a dict", none="nothing", is_hashed=False)
    processors: tuple[AnyProcessor, ...] | None = option(None, "processors", none="none")
    unread: bytes = option(b"", "of a type that nothing reads")


FIELDS = {field.name: field for field in dataclasses.fields(Options)}


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("word", "off", "off"),
        ("maybe", None, None),
        ("count", "auto", "auto"),
        ("count", np.str_("auto"), "auto"),
        ("count", np.int8(3), 3),
        ("bits", -5, -5),
        ("share", np.float32(0.5), 0.5),
        ("share", 2, 2.0),
        ("flag", np.bool_(True), True),
        ("sizes", np.arange(1, 4), (1, 2, 3)),
        ("place", Path("a"), Path("a")),
        ("place", None, None),
        ("entries", {"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}),
        ("entries", '{"a": 1.5}', {"a": 1.5}),
        ("processors", [SOFT, "walks:Walk"], (SOFT, "walks:Walk")),
        ("processors", "walks:Walk", ("walks:Walk",)),
        ("processors", [], None),
    ],
)
def test_a_value_comes_out_as_the_type_says(name, value, want):
    got = read(FIELDS[name], value)
    assert (got, type(got)) == (want, type(want))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("word", "auto", "word must be 'on' or 'off', got 'auto'."),
        ("word", None, "word must be 'on' or 'off', got None."),
        ("maybe", "off", "maybe must be 'on' or None, what the day brings, got 'off'."),
        ("count", "some", "count must be an integer of at least 1, got 'some', which is not "),
        ("count", 0, "got 0, which is not 'auto' either."),
        ("bits", "auto", "bits must be an integer that fits in 64 bits, got 'auto'."),
        ("share", "all", "share must be a finite number, got 'all'."),
        ("flag", 1, "flag must be True or False"),
        ("sizes", 3, "sizes must be a list of at most 1024 sizes, got 3."),
        ("entries", "{", "entries must be a dict of JSON values, or one as JSON text, got '{'."),
        ("entries", [1], "entries must be a dict of JSON values"),
        ("entries", {"a": object()}, "entries must be a dict of JSON values"),
        ("place", 3, "place must be a text or a Path, got 3."),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_name(name, value, message):
    with pytest.raises(ValueError) as caught:
        read(FIELDS[name], value)
    assert message in str(caught.value)


def test_a_type_that_nothing_reads_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="The type of the option unread needs a line in _READERS"):
        read(FIELDS["unread"], b"")
