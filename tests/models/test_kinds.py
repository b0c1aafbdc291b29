"""Kinds: what an entry of config.json may be; a boolean is no number, and 4.0 no integer."""

import pytest

from jaxspec.models.kinds import FLAG, OBJECT, SIZE, TOKEN_IDS, WORD, Block, number, whole, words

NAN, INF = float("nan"), float("inf")
VALUES = {
    "integers": (whole(0, 9), [0, 9], [-1, 10, 4.0, True, "4", [4], 10**5000]),
    "sizes": (SIZE, [1, 2**20], [0, -1, 2**20 + 1, NAN]),
    "numbers": (number(0.5, 10), [0.5, 1, 10], [0.4, 11, True, NAN, INF, -INF, "1", 10**5000]),
    "flags": (FLAG, [True, False], [0, 1, "true", [], {}]),
    "words": (WORD, ["", "x"], [1, True, ["x"], b"x"]),
    "lists": (words(2), [[], ["a", "b"]], [["a"] * 3, "ab", [1], [None], {"a": 1}]),
    "objects": (OBJECT, [{}, {"x": 1}], [[], "x", 1, True]),
    "ids": (TOKEN_IDS, [0, [0, 5], []], [-1, True, [True], 1.0, [[0]], "0", [0] * 17, 2**31]),
}


@pytest.mark.parametrize(("kind", "good", "bad"), VALUES.values(), ids=VALUES)
def test_a_kind_holds_its_values_and_no_others(kind, good, bad):
    for value in good:
        assert Block({"x": value}).find("x", kind) == value
    for value in bad:
        with pytest.raises(ValueError) as caught:
            Block({"x": value}, prefix="rope.").find("x", kind)
        assert str(caught.value).startswith(f"config.json: `rope.x` must be {kind.words}, got ")
        assert len(str(caught.value)) < 300


def test_what_is_null_is_absent_and_what_is_needed_is_asked_for():
    block = Block({"x": None}, file="generation_config.json")
    assert block.find("x", SIZE) is None and block.find("y", SIZE) is None
    assert block.block("y").entries == {}
    with pytest.raises(
        ValueError, match="generation_config.json must give `x`, and does not. Take"
    ):
        block.need("x", SIZE)


def test_an_option_has_one_of_the_values_that_are_computed_in_their_type():
    block = Block({"a": False, "b": 0, "c": "silu"})
    block.refuse_all_but({"a": (False,), "c": ("silu", "swish"), "d": ()})
    with pytest.raises(ValueError, match="`b` must be False, got 0, which jaxspec does not impl"):
        block.refuse_all_but({"b": (False,)})
    with pytest.raises(ValueError, match="`c` must be absent, got 'silu'"):
        block.refuse_all_but({"c": ()})
