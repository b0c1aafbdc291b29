"""Matchers: masks after drafts, ends, blanks, and outputs that keep their form."""

import json
import re

import jsonschema
import numpy as np
import pytest
from constrained import (
    EOS,
    VOCAB,
    Decoder,
    allowed,
    embedded,
    grammar_of,
    masks_of,
    matchers,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import schemas, values_of

from jaxspec.grammar import fill_masks

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "at": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEXES = [
    r"[a-c]{2,5}-[0-9]+",
    r"(yes|no|\d{1,3}%)",
    r"([^\x00-\x1f]|\n){0,20}z",
    r"(ab|a)(bc|c)?",
]
CHOICES = ["yes", "no", 'a "quoted"\nline', "naïve 你好", "yesterday"]
EXPRESSION = 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"\n'
FORMS = [
    {"json": PERSON},
    {"json_object": True},
    *({"regex": regex} for regex in REGEXES),
    {"choice": CHOICES},
    {"grammar": EXPRESSION},
]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form)[:30])
def test_masks_after_drafts_are_those_of_the_states_after_them(form, num_drafts):
    decoder = Decoder(grammar_of(form), seed=1, num_drafts=num_drafts)
    while not decoder.is_finished and len(decoder.tokens) < 60:
        drafts = decoder.drafts()
        masks = masks_of(decoder.matcher, drafts, places=1 + len(drafts))
        other = decoder.factory.matcher(decoder.grammar, decoder.tokens)
        for place in range(1 + len(drafts)):
            np.testing.assert_array_equal(masks[place], masks_of(other)[0])
            if place == len(drafts) or drafts[place] not in allowed(masks[place]):
                break
            if drafts[place] in EOS:
                break
            other.advance([drafts[place]])
        decoder.step()


def check(form, text):
    if "json" in form:
        jsonschema.validate(json.loads(text), form["json"])
    elif "json_object" in form:
        assert isinstance(json.loads(text), dict)
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text, re.DOTALL)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        assert re.fullmatch(r"[0-9+()]+", text) and eval(re.sub(r"\b0+(?=\d)", "", text)) >= 0


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form)[:30])
def test_every_finished_text_has_its_form(form, num_drafts):
    finished = 0
    for seed in range(12):
        decoder = Decoder(grammar_of(form), seed=seed, num_drafts=num_drafts).run()
        if decoder.is_finished:
            check(form, decoder.text)
            finished += 1
    assert finished >= 3


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 9))
def test_texts_of_generated_schemas_validate(schema, seed):
    decoder = Decoder(grammar_of({"json": schema}), seed=seed, num_drafts=3 * (seed % 2)).run(200)
    if decoder.is_finished:
        jsonschema.validate(json.loads(decoder.text), schema)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_valid_texts_of_a_schema_are_accepted(data):
    """All that a schema allows may be said, in compact form."""
    schema = data.draw(schemas())
    value = data.draw(values_of(schema))
    jsonschema.validate(value, schema)
    matcher = matchers(embedded()).matcher(grammar_of({"json": schema}))
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    matcher.advance(embedded().encode(text, add_special_tokens=False))
    assert not matcher.is_error and matcher.is_accepting, text


def test_the_end_is_allowed_where_the_grammar_accepts_alone():
    grammar = grammar_of({"regex": "ab?"})
    matcher = matchers(embedded()).matcher(grammar)
    a, b = (embedded().encode(each, add_special_tokens=False)[0] for each in "ab")
    masks = masks_of(matcher, [a, b])
    assert not {*EOS} & {*allowed(masks[0])}
    assert {*EOS, b} == {*allowed(masks[1])}
    assert {*EOS} == {*allowed(masks[2])}


def test_ids_without_a_token_are_never_allowed():
    matcher = matchers(embedded()).matcher(grammar_of({"regex": "(.|\\n)*"}))
    assert max({*allowed(masks_of(matcher)[0])} - {*EOS}) < len(embedded())


@pytest.mark.parametrize("strange", [-1, VOCAB, 2**31, VOCAB - 1])
def test_drafts_that_are_no_tokens_leave_the_matcher_as_it_is(strange):
    matcher = matchers(embedded()).matcher(grammar_of({"regex": "a*"}))
    (a,) = embedded().encode("a", add_special_tokens=False)
    before = masks_of(matcher, [a])
    after = masks_of(matcher, [a, strange, a])
    np.testing.assert_array_equal(after[:2], before)
    assert not matcher.is_error
    np.testing.assert_array_equal(masks_of(matcher, [a]), before)


def test_a_matcher_in_error_allows_nothing_and_leaves_its_neighbours():
    factory, grammar = matchers(embedded()), grammar_of({"choice": ["yes"]})
    wrong, right = factory.matcher(grammar), factory.matcher(grammar)
    wrong.advance([700, 701])
    masks = np.full((2, 3, VOCAB // 32), -1, np.int32)
    fill_masks([wrong, right], [[1, 2], []], masks)
    assert wrong.is_error and not masks[0].any()
    np.testing.assert_array_equal(masks[1, 0], masks_of(right)[0])


def test_masks_of_several_matchers_do_not_touch_each_other():
    forms = [{"regex": "[ab]*"}, {"choice": CHOICES}, {"json": PERSON}, {"regex": "[0-9]+"}]
    decoders = [Decoder(grammar_of(f), seed=i, num_drafts=i % 3) for i, f in enumerate(forms)]
    for _ in range(10):
        drafts = [decoder.drafts() for decoder in decoders]
        masks = np.full((5, 4, VOCAB // 32), 7, np.int32)
        fill_masks([decoder.matcher for decoder in decoders], drafts, masks)
        for row, decoder, own in zip(masks, decoders, drafts, strict=False):
            np.testing.assert_array_equal(row[0], masks_of(decoder.matcher, own)[0])
        assert (masks[4] == 7).all()
        for decoder in decoders:
            if not decoder.is_finished:
                decoder.step()


@pytest.mark.parametrize(("options", "most"), [({}, 32), ({"max_whitespace": 3}, 3)])
def test_blanks_between_json_tokens_are_bounded(options, most):
    """The worst model writes blanks alone wherever it may."""
    grammar = grammar_of({"json": PERSON} | options)
    matcher = matchers(embedded()).matcher(grammar)
    space, newline = (embedded().encode(each, add_special_tokens=False)[-1] for each in " \n")
    matcher.advance(embedded().encode("{", add_special_tokens=False))
    for token in (space, newline):
        run = matchers(embedded()).matcher(grammar, embedded().encode("{"))
        count = 0
        while token in allowed(masks_of(run)[0]) or space in allowed(masks_of(run)[0]):
            ids = allowed(masks_of(run)[0])
            run.advance([token if token in ids else space])
            count += 1
            assert count <= most
        assert count >= 1


def test_blanks_can_be_turned_off():
    matcher = matchers(embedded()).matcher(
        grammar_of({"json": PERSON, "disable_any_whitespace": True})
    )
    matcher.advance(embedded().encode("{", add_special_tokens=False))
    texts = [embedded().decode([token]) for token in allowed(masks_of(matcher)[0])]
    assert texts and all(text.startswith('"') for text in texts)


def test_a_matcher_goes_on_after_the_output_of_a_migrated_request():
    decoder = Decoder(grammar_of({"json": PERSON}), seed=3, num_drafts=3)
    for _ in range(4):
        decoder.step()
    later = decoder.factory.matcher(decoder.grammar, decoder.tokens)
    np.testing.assert_array_equal(masks_of(later), masks_of(decoder.matcher))
