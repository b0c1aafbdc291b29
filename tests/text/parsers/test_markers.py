"""The first tag is found, and what may be a part of one is left."""

import pytest

from jaxspec.text.parsers.markers import Markers


def test_the_first_tag_is_found():
    markers = Markers(("<a>", "<bc>"))
    assert markers.find("x<<bc><a>", 0) == (2, "<bc>")
    assert markers.find("x<<bc><a>", 3) == (6, "<a>")


@pytest.mark.parametrize(
    "text, place", [("", 0), ("ab", 2), ("a<", 1), ("<<b", 1), ("<bx", 3), ("<bc", 0)]
)
def test_a_part_of_a_tag_is_left(text, place):
    assert Markers(("<a>", "<bc>")).find(text, 0) == (place, "")


def test_without_tags_nothing_is_left():
    assert Markers(()).find("a<", 0) == (2, "")


@pytest.mark.parametrize("tag", ["a", "a<b", "<a<", ""])
def test_a_tag_has_one_opening_bracket(tag):
    with pytest.raises(ValueError, match="begins with its only"):
        Markers((tag,))
