"""`jaxspec serve`: its options are those of the server and of the engine, with their defaults."""

import subprocess
import sys

import pytest

from jaxspec import __main__ as command
from jaxspec.options import engine_options as engine
from jaxspec.server import command as serve_command
from jaxspec.server.command import main, parser
from jaxspec.server.options import OPTIONS, ServerOptions


@pytest.fixture
def served(monkeypatch):
    """What the command would serve."""
    found = {}

    async def serve(make_llm, options):
        found.update(options=options, model=make_llm.args, llm=make_llm.keywords)
        return 0

    monkeypatch.setattr(serve_command, "serve", serve)
    return found


def test_without_words_all_defaults_hold(served):
    assert main([]) == 0
    assert served["options"] == ServerOptions() and served["model"] == (None,)
    config = {name: value for name, value in served["llm"].items() if name in engine.OPTIONS}
    assert engine.EngineConfig.of(None, config) == engine.EngineConfig()


def test_words_are_read_as_the_options_are_meant(served):
    words = (
        "some/model --port 0 --api-key a --api-key b --no-access-log --max-num-queued-reqs 7 "
        "--stream-interval 8 "
        "--max-num-seqs 4 --decode-buckets 1,4 --max-step-ms 2.5 --steps-per-dispatch auto "
        "--enable-prefix-caching --gpu-memory-utilization 0.5 --num-speculative-tokens 0"
    )
    assert command.main(["serve", *words.split()]) == 0
    assert served["model"] == ("some/model",)
    options, llm = served["options"], served["llm"]
    assert (options.port, options.api_key, options.access_log) == (0, ("a", "b"), False)
    assert llm["max_num_queued_reqs"] == 7 == options.max_num_queued_reqs
    assert llm["stream_interval"] == 8 == options.stream_interval
    assert llm["decode_buckets"] == (1, 4) and llm["max_step_ms"] == 2.5
    assert llm["steps_per_dispatch"] == "auto" and llm["enable_prefix_caching"] is True
    assert llm["speculative_config"] is None
    config = {name: value for name, value in llm.items() if name in engine.OPTIONS}
    assert engine.EngineConfig.of(None, config).max_num_seqs == 4


def test_a_reasoning_parser_is_of_the_server_and_of_its_engine(served):
    assert main(["--reasoning-parser", "qwen3"]) == 0
    assert served["options"].reasoning_parser == served["llm"]["reasoning_parser"] == "qwen3"


def test_logits_processors_are_one_list_however_they_are_given(served):
    for words in ("--logits-processors a:b c:d", "--logits-processors a:b --logits-processors c:d"):
        assert main(["some/model", *words.split()]) == 0
        assert served["llm"]["logits_processors"] == ("a:b", "c:d")
    with pytest.raises(ValueError, match="Each of logits_processors must be.*got 'ab'"):
        main(["--logits-processors", "ab"])


def test_the_help_tells_every_option_with_its_default():
    text = " ".join(parser().format_help().split())
    for name in [*OPTIONS, *engine.OPTIONS]:
        if name not in ("model", "show_progress"):
            assert f"--{name.replace('_', '-')}" in text, name
    assert "--port N port to bind; 0 chooses a free port (default: 8000)" in text


def test_a_wrong_word_is_one_line_and_status_2(capsys):
    for words in (["--port", "x"], ["--max-n", "0"], ["--api-key-file", "/nowhere"], ["--no-such"]):
        try:
            status = command.main(["serve", *words])
        except SystemExit as error:
            status = error.code
        assert status == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxspec: ")


def test_the_library_imports_nothing_of_the_extra():
    """Its packages need not be there, and the first command does not wait for them."""
    extra = {"fastapi", "starlette", "uvicorn", "pydantic", "orjson", "prometheus_client"}
    code = f"import jaxspec, jaxspec.__main__, sys; print(*({extra} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_without_the_extra_the_way_to_it_is_told(monkeypatch, capsys):
    for name in ("command", "run", "http.http_server"):
        monkeypatch.delitem(sys.modules, f"jaxspec.server.{name}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert command.main(["serve"]) == 2
    assert "pip install 'jaxspec[server]'" in capsys.readouterr().err
