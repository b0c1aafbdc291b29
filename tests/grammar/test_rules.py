"""Rules joined to a grammar that llguidance reads."""

import json

from grammar_walks import accepts, tokenizer_with

from jaxspec.grammar.rules import Rules, either, json_value, literal


def test_rules_refer_to_each_other_and_equal_ones_are_one():
    rules = Rules()
    words = [rules.add(literal(word)) for word in ('a"b', "é\n", 'a"b')]
    assert words[0] == words[2] != words[1]
    until_mark = rules.shortest('/(?s:.*)/ "!"')
    grammar = rules.grammar(f"{either(words[:2])} {until_mark}")
    tokenizer = tokenizer_with()
    for text, is_in in (('a"b!', True), ("é\nxy!", True), ("é!", False), ("é\n!!", False)):
        assert accepts(grammar, tokenizer, text) == is_in, text


def test_json_has_the_blanks_of_templates_and_notes_are_dropped():
    inner = {"type": "integer", "description": "a ::= b", "title": "A"}
    schema = {"type": "object", "properties": {"title": inner}, "required": ["title"]}
    schema |= {"default": {"title": 1}, "additionalProperties": False}
    written = json_value(schema)
    assert "::=" not in written and "default" not in written
    grammar, tokenizer = Rules().grammar(written), tokenizer_with()
    assert accepts(grammar, tokenizer, json.dumps({"title": 5}))
    for text in ('{"title":5}', '{ "title": 5}', '{"title": "5"}', "{}"):
        assert not accepts(grammar, tokenizer, text)
    for name, is_in in (("date", False), ("int64", True), (["x"], True)):
        written = json_value({"type": "string", "format": name})
        assert accepts(Rules().grammar(written), tokenizer, '"abc"') == is_in
    values = {"enum": [{"title": 1, "default": 2}]}
    assert accepts(Rules().grammar(json_value(values)), tokenizer, json.dumps(values["enum"][0]))
