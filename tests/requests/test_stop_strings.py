import random

import pytest

from jaxspec.requests.stop_strings import StopStrings


def cut_oracle(text, stops):
    """Grow the text by one character until it ends in a stop string; the longest counts."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces, stops):
    search = StopStrings(stops)
    shown = [search.push(piece) for piece in pieces]
    return "".join(shown) + search.flush(), search


def pieces_of(text, rng):
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_does_not_depend_on_the_split(seed):
    rng = random.Random(seed)
    for _ in range(50):
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 4))) for _ in range(rng.randrange(4))]
        text = "".join(rng.choices("ab\nc", k=rng.randrange(16)))
        expected, matched = cut_oracle(text, stops)
        for pieces in ([text], list(text), pieces_of(text, rng)):
            got, search = run(pieces, stops)
            assert (got, search.matched) == (expected, matched)
            assert search.position == (None if matched is None else len(expected))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keeps", [False, True])
def test_what_completes_while_nothing_may_end_is_passed_over(seed, keeps):
    """A character a piece: the first `passed` of them may not end the text."""
    rng = random.Random(seed)
    for _ in range(50):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randrange(16)))
        passed = rng.randrange(8)
        search = StopStrings(stops, keeps_match=keeps)
        got = "".join(search.push(c, may_end=n >= passed) for n, c in enumerate(text))
        expected, matched = text, None
        for end in range(passed + 1, len(text) + 1):
            if found := [stop for stop in stops if text[:end].endswith(stop)]:
                matched = max(found, key=len)
                expected = text[: end if keeps else end - len(matched)]
                break
        assert (got + search.flush(), search.matched) == (expected, matched)


def test_text_that_may_begin_a_stop_string_is_held_back():
    search = StopStrings(["</s>", "STOP"])
    assert [search.push(piece) for piece in ("Hi <", "/", "b> S", "TO", "P it")] == [
        "Hi ",
        "",
        "</b> ",
        "",
        "",
    ]
    assert (search.matched, search.position) == ("STOP", 8)
    assert search.push("more") == search.flush() == ""


def test_what_is_held_back_comes_out_at_the_end():
    search = StopStrings(["\n\nUser:"])
    assert search.push("done\n\nUse") == "done"
    assert search.flush() == "\n\nUse"
    assert search.matched is None


def test_without_stop_strings_text_passes_at_once():
    search = StopStrings([])
    assert search.push("text") == "text"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_one_string_is_one_stop_string():
    assert run(["some stop here"], "stop")[0] == "some "
