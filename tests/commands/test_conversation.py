"""Conversations: which messages the model is told, and what stays of an answer that was stopped."""

import asyncio
import json

import pytest
from scripted_llm import ScriptedLLM

from jaxspec import SamplingParams
from jaxspec.commands.conversation import Conversation

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
USER, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}


def begun(pieces=("Ye", "s."), template=TEMPLATE, reason="stop", **options):
    llm = ScriptedLLM(pieces, template, reason)
    return llm, Conversation(llm, SamplingParams(), **options)


def test_the_model_is_told_all_messages_before(capsys):
    llm, told = begun(system="Be kind.")
    system = {"role": "system", "content": "Be kind."}
    assert asyncio.run(told.answer("Hi")) and asyncio.run(told.answer("Hi"))
    assert llm.asked["messages"] == [system, USER, YES, USER]
    assert told.messages == [system, USER, YES, USER, YES]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == out[2] == "Yes." and out[1].startswith("[2 tokens, ")
    told.reset()
    assert told.messages == [system]
    told.system = ""
    assert told.messages == []


def test_stats_of_all_answers_stand_in_a_line(capsys):
    _, told = begun()
    assert told.stats == "[no answers yet]"
    for _ in range(2):
        asyncio.run(told.answer("Hi"))
    assert told.stats.startswith("[2 answers: 4 tokens, ")
    assert told.stats.endswith("prompt tokens cached]")


def test_messages_are_saved_as_json(tmp_path, capsys):
    _, told = begun(["schön"])
    asyncio.run(told.answer("Hi"))
    told.save(tmp_path / "chat.json")
    text = (tmp_path / "chat.json").read_text(encoding="utf-8")
    assert "schön" in text and json.loads(text) == told.messages


@pytest.mark.parametrize(("num_seen", "kept"), [(0, []), (1, [USER, YES | {"content": "Ye"}])])
def test_of_an_answer_that_is_stopped_what_has_come_stays(num_seen, kept, capsys):
    llm, told = begun()

    async def stop():
        task = asyncio.ensure_future(told.answer("Hi"))
        for _ in range(20):
            await asyncio.sleep(0)
            if capsys.readouterr().out.count("Ye") == num_seen and llm.asked:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    assert told.messages == kept and "[stopped]" in capsys.readouterr().out
    asyncio.run(told.answer("Hi"))
    assert told.messages == [*kept, USER, YES]


def test_a_message_that_the_template_refuses_is_forgotten(capsys):
    _, told = begun(template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="no"):
        asyncio.run(told.answer("Hi"))
    assert told.messages == []


def test_tags_of_reasoning_are_not_hidden_from_the_parser(capsys):
    llm, told = begun(["<think>so</think>", "Yes."], TEMPLATE + "{# </think> #}")
    asyncio.run(told.answer("Hi"))
    assert not llm.params.skip_special_tokens
    assert told.messages[-1] == YES | {"reasoning_content": "so"}


def test_a_model_that_gives_nan_is_told_of(capsys):
    _, told = begun([], reason="error")
    assert not asyncio.run(told.answer("Hi"))
    assert "no finite logits" in capsys.readouterr().err and told.messages == []


def test_colours_and_a_legend_are_printed_if_asked_for(capsys):
    _, told = begun(color=True)
    asyncio.run(told.answer("Hi"))
    assert "target 2 (100%)" in capsys.readouterr().out.splitlines()
