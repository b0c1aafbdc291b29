"""Automata: masks equal to a matcher's, walks that keep the regex, and limits that hold."""

import re
import time

import numpy as np
import pytest
from automata import (
    EOS,
    VOCAB,
    allowed,
    compiler,
    ll_allowed,
    ll_matcher,
    text_of,
    token_bytes,
    walk,
)

from jaxspec.grammar.automaton import MAX_CLASSES, MAX_STATES, AutomatonCompiler

REGEXES = [
    r"[a-z]+@[a-z]+\.(com|org)",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])( [0-2]\d:[0-5]\d)?",
    r"(yes|no|\d{1,3}%)",
    r"(a|ab)(c|bcd)?(d*)",
    r"([^\x00-\x1f]|\n){0,20}z",
    r"(?i)true|(?-i:false)|null",
    r"(?s).{0,12}",
    r"a+?b*?(?P<name>c{2,}|[é-ü]+)",
    r"[\w-]+(, [^\W\d]\S*\s)*",
    r"日本[語人]?|🙂{2}|é*x",
    r"\{\"name\": \"[^\"\\]{1,8}\", \"age\": (0|[1-9][0-9]{0,2})\}",
    r"^(?:[A-Fa-f0-9]{2}:){2}[\x{41}-\u0046]$",
    r"\D\s?\w{2}|[\d.]+",
    r"|x",
    r"(a*)*b{0}",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_a_matcher(regex, seed):
    automaton, matcher = compiler().compile(regex), ll_matcher(regex)
    tokens = walk(automaton, np.random.default_rng(seed), most=12)
    for place in range(len(tokens)):
        state = automaton.after(tokens[:place])
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: -(-VOCAB // 32)]
        is_forced = bool(matcher.compute_ff_tokens())  # then its mask has the canonical token only
        if is_forced:
            assert not (mask & ~automaton.mask(state)).any()
        else:
            np.testing.assert_array_equal(automaton.mask(state), mask)
        if not matcher.is_stopped() and (is_forced or place % 4 == 0):
            assert allowed(automaton, state).tolist() == ll_allowed(matcher)
        if tokens[place] != EOS:
            assert matcher.consume_token(tokens[place])


@pytest.mark.parametrize("regex", REGEXES)
def test_a_text_that_ends_matches_the_regex(regex):
    automaton, random = compiler().compile(regex), np.random.default_rng(0)
    python = re.sub(r"\\x\{41\}", "A", regex)
    is_of_rust = re.search(r"\\[wd]", regex) is not None  # Python's are of an older Unicode
    ended = 0
    for _ in range(40):
        tokens = walk(automaton, random)
        if tokens[-1] == EOS:
            text = text_of(tokens).decode()
            assert is_of_rust or re.fullmatch(python, text), text
            matcher = ll_matcher(regex)
            assert matcher.consume_tokens(tokens[:-1]) and matcher.is_accepting()
            ended += 1
            assert not allowed(automaton, automaton.after(tokens)).size
            assert automaton.after([*tokens, EOS]) == -1
    assert ended


@pytest.mark.parametrize("regex", REGEXES)
def test_no_state_is_a_dead_end_or_out_of_reach(regex):
    table = compiler().compile(regex).next
    num_states, end = len(table), len(table) - 1
    edges = {(s, int(t)) for s in range(num_states) for t in table[s] if t >= 0}
    for start, direction in ((0, 1), (end, -1)):
        found, frontier = {start}, [start]
        while frontier:
            state = frontier.pop()
            new = {edge[::direction][1] for edge in edges if edge[::direction][0] == state}
            frontier += new - found
            found |= new
        assert found == set(range(num_states))
    assert (table[end] == -1).all()


def test_states_without_a_token_that_leaves_them_are_removed():
    small = AutomatonCompiler([b"a", b"b", b"ab", None, b""], [3], 6)
    automaton = small.compile("a(bc|b?)|bx")
    assert allowed(automaton, 0).tolist() == [0, 2]  # "b" would need an x
    assert allowed(automaton, automaton.after([0])).tolist() == [1, 3]
    assert allowed(automaton, automaton.after([2])).tolist() == [3]
    with pytest.raises(ValueError):
        small.compile("bx")


def test_characters_split_over_tokens():
    words = ["é", "日本", "🙂", "naïve ∅"]
    automaton = compiler().compile("|".join(map(re.escape, words)))
    single = {text: token for token, text in enumerate(token_bytes()) if text and len(text) == 1}
    for word in words:
        tokens = [single[bytes([byte])] for byte in word.encode()]
        states = [automaton.after(tokens[:place]) for place in range(len(tokens) + 1)]
        assert min(states) >= 0
        ends = [EOS in allowed(automaton, state) for state in states]
        assert ends == [False] * len(tokens) + [True]
        assert automaton.after([*tokens[:-1], single[b"a"]]) == -1


def test_choices():
    choices = ["yes", "no", 'a "quoted"\nline', "naïve 你好", "yesterday", "a+b (c)", ""]
    automaton = compiler().compile("|".join(map(re.escape, choices)))
    random, found = np.random.default_rng(0), set()
    for _ in range(300):
        tokens = walk(automaton, random, most=100)
        assert tokens[-1] == EOS
        found.add(text_of(tokens).decode())
    assert found == set(choices)


def thinking_compiler(*, special):
    texts = token_bytes().copy()
    texts += [None, b"</think>" if not special else None, b"", None]
    return AutomatonCompiler(texts, [EOS], VOCAB), len(texts) - 3


@pytest.mark.parametrize("special", [True, False])
def test_any_text_may_precede_the_end_of_thinking_that_does_not_spell_it(special):
    thinking, end = thinking_compiler(special=special)
    automaton, plain = (
        thinking.compile("yes|no", thinking_end=end),
        thinking.compile(r"\n{0,4}(yes|no)"),
    )
    random = np.random.default_rng(0)
    spelling = [token_bytes().index(bytes([byte])) for byte in b"</think>"]
    tags = [spelling[: random.integers(1, 8)] for _ in range(10)]
    for tag in [[], *tags, [*spelling[:3], *spelling[:7]]]:
        texts = [*random.integers(1, 256, random.integers(0, 4)).tolist(), *tag]
        before = text_of(texts)
        expected = {
            token
            for token, own in enumerate(token_bytes())
            if own and token != EOS and b"</think>" not in before + own
        }
        assert set(allowed(automaton, automaton.after(texts))) == expected | {end}
        answer = walk(plain, random)
        for place in range(len(answer)):
            state = automaton.after([*texts, end, *answer[:place]])
            wanted = plain.mask(plain.after(answer[:place]))
            np.testing.assert_array_equal(automaton.mask(state), wanted)
    assert automaton.after(spelling) == -1


def test_the_end_of_thinking_keeps_its_text_in_the_answer():
    thinking, end = thinking_compiler(special=False)
    automaton = thinking.compile("<?/?.?.?think>x|</think>", thinking_end=end)
    assert automaton.after([end, end, EOS]) == len(automaton.next) - 1
    assert automaton.after([end, end, end]) == -1


@pytest.mark.parametrize("end", [-1, EOS, VOCAB])
def test_the_end_of_thinking_is_a_token(end):
    with pytest.raises(ValueError):
        compiler().compile("a", thinking_end=end)


def test_several_end_of_sequence_ids_are_one_class():
    texts = [b"a", b"b", None]
    automaton = AutomatonCompiler(texts, [1, 2, 7, 99], 8).compile("a*b?")
    assert allowed(automaton, 0).tolist() == [0, 1, 2, 7]  # 1 ends, and is no b
    assert len({int(automaton.classes[token]) for token in (1, 2, 7)}) == 1
    assert automaton.classes.dtype == automaton.next.dtype == np.int16
    for ids in ([], [8], [-1]):
        with pytest.raises(ValueError):
            AutomatonCompiler(texts, ids, 8)
    with pytest.raises(ValueError):
        AutomatonCompiler(texts, [0], 2)


@pytest.mark.parametrize("size", [31, 32, 33])
def test_masks_have_a_bit_per_token(size):
    automaton = AutomatonCompiler([b"a"] * (size - 1), [size - 1], size).compile("a?")
    assert automaton.mask(0).dtype == np.int32
    assert automaton.mask(0).shape == (-(-size // 32),)
    assert allowed(automaton, 0).tolist() == list(range(size))
    assert not automaton.mask(-1).any()
    assert automaton.after([size]) == automaton.after([-1]) == automaton.after([0, 0]) == -1


HOSTILE = [
    "(a|b)*a(a|b){30}",
    "((a{50}){50}){50}",
    "((((){1000}){1000}){1000}){1000}",
    r"\w{1000}",
    ".{900}",
    "(.*a){9}.*b.{9}",
    "|".join(f"word{number}{number * number}" for number in range(4000)),
    "(((a{1,1000}b){1,4}c)?d){1,9}",
    "(" * 60 + "a" + ")" * 60,
    "a" * 100_000,
    "a" * 60_000,
    "(" * 60_000,
    "a" + "{1}" * 10_000,
    "(?s)(.*a.{9})?" * 90,
    "(.?){900}a",
    r"(\w|\d|\s){300}",
]


@pytest.mark.parametrize("regex", HOSTILE, ids=range(len(HOSTILE)))
def test_limits_hold_quickly(regex):
    begun = time.monotonic()
    with pytest.raises(ValueError):
        compiler().compile(regex)
    assert time.monotonic() - begun < 10  # about 1 s on an idle machine


def test_tables_are_within_the_limits():
    thousands = "[a-z]{1000}" * 4
    automaton = compiler().compile(f"{thousands}[a-z]{{1,{MAX_STATES - 4002}}}")
    assert automaton.next.shape[0] == MAX_STATES and automaton.next.shape[1] <= MAX_CLASSES
    with pytest.raises(ValueError):
        compiler().compile(f"{thousands}[a-z]{{1,{MAX_STATES - 4001}}}")


def test_a_forced_token_is_the_longest_of_the_text_that_must_follow():
    texts = [b"a", b"b", b"c", b"ab", b"abc", b"abd", b"bc", b"d", None, b"aba"]
    compiler = AutomatonCompiler(texts, [8], len(texts) + 2)
    forced = {
        "abc": 4,  # a, ab and abc are its beginnings
        "ab[cd]": 3,  # abc and abd are two texts
        "abe?": 3,
        "[ab]c": -1,
        "(ab)*c": -1,
        "d": 7,
    }
    for regex, token in forced.items():
        automaton = compiler.compile(regex)
        assert automaton.forced[0] == token, regex
    automaton = compiler.compile("abc")
    assert automaton.forced[automaton.after([0])] == 6  # bc
    assert automaton.forced[automaton.after([4])] == 8  # the end
    assert automaton.forced[-1] == -1
