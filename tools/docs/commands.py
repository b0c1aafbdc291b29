"""docs/commands.md, made of the commands' own help (`jaxspec.commands`).

python -m tools.docs.commands            writes it
python -m tools.docs.commands --check    ends with status 1 if it is not what would be written
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from jaxspec.commands import COMMANDS, run_command
from tools.docs.kept_page import keep

PATH = Path(__file__).parents[2] / "docs" / "commands.md"
COMMAND = "python -m tools.docs.commands"
_WIDTH = 98  # columns of a line of help
_HEAD = f"""\
<!-- Made by `{COMMAND}` of jaxspec/commands; change those. -->
# Commands

`pip install` puts `jaxspec` beside `python -m jaxspec`; both are the same. The first word names the
command, and where it names none, all words are prompts to complete. `--version` tells the version.

| command | what it does |
|---|---|
"""
_SERVE = """
## serve
A server that the clients of OpenAI and Anthropic know; [serving.md](serving.md) is about it, and
`python -m jaxspec serve --help` lists its options. It needs `pip install 'jaxspec[server]'`.
"""
_REPLAY = """
## replay
[flights.md](flights.md) is about it.
"""
_ABOUT = {
    "complete": "No word names it: all of them are prompts, or options.",
    "run": """\
A file in OpenAI's batch form goes in, as `vllm run-batch` takes it, and a file of answers comes
out. The server's own code answers, without a socket. So requests have the same fields, checks and
errors as over HTTP, and this needs `pip install 'jaxspec[server]'` too.

```bash
python -m jaxspec run -i requests.jsonl -o answers.jsonl Qwen/Qwen3.5-0.8B --max-num-seqs 64
```

- A line that is no request is named with its number, and nothing is run. What the model refuses,
  such as a prompt that is too long, is the answer of its line alone, with the status that HTTP has.
- Answers come in the order of the requests, each written when those before it are. Answers that
  were written stay after Ctrl-C; another call begins anew.
- Unlike vLLM's, an error stands in `response.body` as OpenAI documents it, not in `error`.""",
    "chat": """\
Lines may come from a pipe, too: then text is printed as the model wrote it. At a terminal reasoning
is dim. `/save` writes it as `reasoning_content`, apart from `content`, and templates are told so.
Earlier messages are found in the prefix cache as [prefix-caching.md](prefix-caching.md) says.""",
    "bench": """\
Words and keys of JSON are those of `vllm bench latency` and `vllm bench throughput`, as far as they
have them. Other defaults differ: a laptop should be done in minutes. What runs first is not timed,
and prefixes are not kept. [traffic.md](traffic.md) says what to expect of a server's load.

```bash
python -m jaxspec bench throughput Qwen/Qwen3.5-0.8B --num-prompts 256 --max-num-seqs 64 \\
    --input-len 512 --output-len 256 --prompts-file prompts.txt --output-json figures.json
```""",
    "inspect": "A `config.json` is enough. `jaxspec.inspect` is the same in Python.",
}


def page() -> str:
    """The whole file: the table, then each command with its help."""
    rows = "".join(f"| `{name}` | {command.help} |\n" for name, command in COMMANDS.items())
    sections = [
        _section("complete", []),
        _SERVE,
        _section("run", ["run"]),
        _section("chat", ["chat"]),
        _section("bench", ["bench"], ["bench", "latency"], ["bench", "throughput"]),
        _section("inspect", ["inspect"]),
        _REPLAY,
    ]
    return _HEAD + rows + "".join(sections)


def _section(name: str, *commands: list[str]) -> str:
    helps = "\n".join(f"```\n{help_of(words)}```\n" for words in commands)
    return f"\n## {name}\n{_ABOUT[name]}\n\n{helps}"


def help_of(words: Sequence[str]) -> str:
    """Return the output of `--help`, at any width of the terminal."""
    terminal = {"COLUMNS": str(_WIDTH + 2), "NO_COLOR": "1"}
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, terminal),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        run_command([*words, "--help"])
    return printed.getvalue()


def main() -> int:
    return keep(PATH, page, COMMAND, __doc__)


if __name__ == "__main__":
    sys.exit(main())
