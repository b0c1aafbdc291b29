"""Each reader takes its kind and names the place of anything else."""

import pytest

from jaxspec.server.translate.fields import (
    FieldError,
    content,
    items,
    mapping,
    named,
    objects,
    one_of,
    text,
)


def test_right_values_pass():
    assert text("a", "x") == "a" and mapping({"a": 1}, "x") == {"a": 1}
    assert items(["a"], "x") == [("x.0", "a")] and objects([{}], "x") == [("x.0", {})]
    assert named({"a": 1, "b": None, "c": 2}, ("a", "b")) == {"a": 1}
    assert one_of({"type": "t"}, "x", ("t",)) == {"type": "t"}


@pytest.mark.parametrize("read", [text, mapping, items, objects])
def test_an_error_names_the_place_and_what_came(read):
    with pytest.raises(FieldError, match=r"^a\.0 must be .*, got 5\. ") as told:
        read(5, "a.0")
    assert told.value.param == "a.0"


def test_a_content_is_a_text_or_parts():
    def part(told):
        return {"type": "text", "text": told}

    assert content("a", "x", ("text",)) == content([part("a")], "x", ("text",)) == "a"
    assert content(None, "x", ()) == content([], "x", ()) == ""
    assert content([part("a") | {"cache_control": {}}, part("b")], "x", ("text",)) == [
        part("a"),
        part("b"),
    ]
    with pytest.raises(FieldError, match=r"x\.1\.type must be one of text, got 'image'"):
        content([part("a"), {"type": "image"}], "x", ("text",))
    with pytest.raises(FieldError, match=r"x\.0\.text must be a text, got None"):
        content([{"type": "text"}], "x", ("text",))
