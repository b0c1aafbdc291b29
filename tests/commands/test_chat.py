"""chat: lines in, answers out; what a slash says; Ctrl-C and Ctrl-D; errors end no conversation."""

import io
import json
import signal

import pytest
from scripted_llm import ScriptedLLM, ScriptedStream

from jaxspec import LLM, SamplingParams
from jaxspec.__main__ import main
from jaxspec.commands import chat
from jaxspec.engine.errors import EngineDeadError

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


class Scripted(ScriptedLLM):
    """Says "Yes."; what a message `asks` for happens behind the first piece."""

    made = None

    def __init__(self, **options):
        super().__init__(["Ye", "s."], TEMPLATE)
        self.options, self.is_closed = options, False
        Scripted.made = self

    async def warm_up(self, feature_sets):
        self.warm = feature_sets

    async def close(self):
        self.is_closed = True

    async def submit_chat(self, messages, sampling_params=None, **template):
        stream = await super().submit_chat(messages, sampling_params, **template)
        happens = ASKED.get(messages[-1]["content"])
        if happens is not None:
            stream.__class__ = type("Asked", (ScriptedStream,), {"__anext__": happens})
        return stream


async def interrupt(stream):
    if len(stream._pieces) == 2:
        signal.raise_signal(signal.SIGINT)
    return await ScriptedStream.__anext__(stream)


async def die(stream):
    raise EngineDeadError(RuntimeError("it died"))


ASKED = {"interrupt": interrupt, "die": die}


@pytest.fixture
def typed(monkeypatch, capsys):
    """The status and what was printed when lines come from a pipe, or with Ctrl-D at a terminal."""
    monkeypatch.setattr(chat, "AsyncLLM", Scripted)

    def run(*lines, words=(), is_terminal=False):
        stdin, stdout = io.StringIO("".join(f"{line}\n" for line in lines)), chat.sys.stdout
        monkeypatch.setattr(chat.sys, "stdin", stdin)
        if is_terminal:
            monkeypatch.setattr(stdin, "isatty", lambda: True)
            monkeypatch.setattr(stdout, "isatty", lambda: True, raising=False)
        # A shell starts what it runs in the background with this signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            status = main(["chat", *words])
        finally:
            signal.signal(signal.SIGINT, before)
        assert Scripted.made.is_closed
        return status, *capsys.readouterr()

    return run


def test_each_line_is_answered_and_a_line_of_stats_follows(typed):
    status, out, err = typed("Hi", "", "//quit", "/quit", "never read")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[::2] == ["Yes.", "Yes."] and all(line.startswith("[2 t") for line in lines[1::2])
    contents = [message["content"] for message in Scripted.made.asked["messages"]]
    assert contents == ["Hi", "Yes.", "/quit"]


def test_words_with_a_slash_do_what_they_say(typed, tmp_path):
    path = tmp_path / "chat.json"
    words = ["--system-prompt", "Be brief."]
    status, out, err = typed(
        "Hi", "/reset", "/system Be kind.", f"/save {path}", "/stats", words=words
    )
    assert (status, err) == (0, "") and "[1 answers: 2 tokens" in out
    assert json.loads(path.read_text()) == [{"role": "system", "content": "Be kind."}]
    status, out, err = typed("/help", "/halp", "/save", f"/save {tmp_path}/none/x", "Hi")
    assert status == 0 and "/reset " in out and "Yes." in out
    unknown, needs, absent = err.splitlines()
    assert (
        unknown == "jaxspec: There is no /halp. /help lists the commands, and // begins a message."
    )
    assert needs == "jaxspec: /save needs a file to write to, as in `/save chat.json`."
    assert "No such file or directory" in absent


def test_ctrl_c_stops_an_answer_and_at_a_terminal_no_more_than_that(typed):
    status, out, _ = typed("interrupt", "Hi", is_terminal=True)
    assert status == 0 and "[stopped]" in out
    asked = [message["content"] for message in Scripted.made.asked["messages"]]
    assert asked[0] == "interrupt" and asked[-1] == "Hi"
    status, out, _ = typed("interrupt", "Hi")
    assert status == 130 and "[stopped]" in out


def test_ctrl_c_drops_a_line_that_is_not_whole(monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "Hi", EOFError])

    def typed(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    assert list(chat._lines(True)) == ["Hi"]
    assert "Ctrl-D or /quit ends." in capsys.readouterr().out


def test_a_dead_engine_ends_the_conversation(typed):
    status, out, err = typed("die", "Hi")
    assert status == 1 and err.startswith("jaxspec: ") and "Yes." not in out


def test_what_is_typed_goes_to_the_engine_and_its_own_parameters_hold_else(typed):
    words = ["some/model", "--temperature", "0.5", "--max-tokens", "9", "--max-model-len", "64"]
    typed(words=[*words, "--engine-options", '{"max_num_seqs": 2}'])
    made = Scripted.made
    assert made.options == {
        "model": "some/model",
        "speculative_config": "auto",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "enable_prefix_caching": True,
        "background_compilation": False,
    }
    (params,) = made.warm
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 9, None)


@pytest.mark.soak
def test_answers_are_those_of_the_library(short_model, capsys, monkeypatch):
    engine = {"decode_buckets": [1], "prefill_buckets": [64]}
    monkeypatch.setattr(chat.sys, "stdin", io.StringIO("Hi\nWhat is a list?\n"))
    words = ["--max-tokens", "5", "--temperature", "0", "--dtype", "float32"]
    told = ["--max-model-len", "128", "--engine-options", json.dumps(engine)]
    assert main(["chat", str(short_model), *words, *told]) == 0
    printed, messages = capsys.readouterr().out, []
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with LLM(short_model, max_num_seqs=1, max_model_len=128, dtype="float32", **engine) as llm:
        for text in ("Hi", "What is a list?"):
            messages.append({"role": "user", "content": text})
            (output,) = llm.chat(messages, params)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            assert f"{output.outputs[0].text}\n[" in printed
            assert f" of {len(output.prompt_token_ids)} prompt tokens cached" in printed
