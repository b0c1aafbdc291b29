"""The program that renders templates, called here as functions; its limits have their own file."""

import io
import json

from jaxspec.text import template_worker
from jaxspec.text.template_worker import num_kept, render


def test_a_template_gives_its_text_or_why_there_is_none():
    assert render("{{ a }}-{{ b | tojson }}", {"a": 1, "b": ["é"]}, 99) == (True, '1-["é"]')
    assert render("{{ raise_exception('no') }}", {}, 99) == (
        False,
        "it stopped with TemplateError: no",
    )
    wrote, reason = render("{{ raise_exception('no' * 9999) }}", {}, 99)
    assert not wrote and len(reason) < 500


def test_a_text_has_a_longest_length():
    source = "{% for i in range(10) %}{{ i }}{% endfor %}"
    assert render(source, {}, 10) == (True, "0123456789")
    assert render(source, {}, 9) == (False, "it wrote more than 9 characters")


def test_what_another_text_begins_with_is_counted_in_characters():
    source = "{% for m in messages %}<{{ m }}>{% endfor %}"
    for messages, kept in ((["é🙂", "b"], 4), (["é🙂x"], 3), ([], 0), (["a"], 1)):
        assert num_kept(source, {"messages": messages}, "<é🙂>...") == kept
    assert num_kept("{{ raise_exception('no') }}", {}, "a") == 0
    parted = "ab{% for i in [1] %}x{{ raise_exception('behind it') }}{% endfor %}"
    assert num_kept(parted, {}, "ac") == 1


def test_memory_that_is_not_there_is_a_reason():
    wrote, reason = render("{% set x = 'a' * 10 ** 17 %}{{ x }}", {}, 99)
    assert (wrote, reason) == (False, "it needed more memory than it may take")


def test_requests_and_answers_tell_their_lengths(monkeypatch):
    monkeypatch.setattr(template_worker, "resource", None)  # no limit for the tests
    limits = {"seconds": 5, "characters": 99}
    asked = [("{{ a }}", "é\ud800", []), ("{{ a.b.c }}", 1, [[]])]
    asked += [("{{ messages }}{{ add_generation_prompt }}", [7], [[8], []])]
    stream = b""
    for source, value, turns in asked:
        variables = {"a": value, "messages": value, "add_generation_prompt": False}
        request = {"source": source, "variables": variables, "turns": turns, **limits}
        encoded = json.dumps(request).encode()
        stream += len(encoded).to_bytes(8, "big") + encoded
    answers = io.BytesIO()
    template_worker._serve(io.BytesIO(stream), answers)
    answers.seek(0)
    first, second, third = (answers.read(int.from_bytes(answers.read(8), "big")) for _ in asked)
    assert first.decode("utf-8", "surrogatepass") == "Té\ud800"
    assert second.startswith(b"Eit stopped with UndefinedError: ")
    kept = [int.from_bytes(answers.read(8), "big") for _ in range(2)]
    assert third == b"T[7]False" and kept == [len("[7"), len("[7]")]
    assert not answers.read()
