"""docs/options.md, made of the options of `LLM` (`options.engine_options`, `options.vllm_options`).

python -m tools.docs.options            writes it
python -m tools.docs.options --check    ends with status 1 if it is not what would be written
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.options.engine_options import OPTIONS, default_of, meaning
from jaxspec.options.vllm_options import RENAMED, UNDERSTOOD
from tools.docs.kept_page import keep

PATH = Path(__file__).parents[2] / "docs" / "options.md"
COMMAND = "python -m tools.docs.options"
_HEAD = f"""\
<!-- Made by `{COMMAND}` of jaxspec/options/engine_options.py and vllm_options.py; change those. -->
# Options of `LLM`

`jaxspec.LLM(model, **options)` takes these, and `jaxspec.generate(prompts, model, **options)` too.
`python -m jaxspec --help` lists those that the command has. An option outside its range, or one
that does not go with another, is refused with the rule and what came.

| option | default | meaning |
|---|---|---|
"""


_VLLM = """
## vLLM's words
These are taken too. Other values of those that have values here are refused, with the way out.

| option of vLLM's | values | what it is here |
|---|---|---|
"""


def page() -> str:
    """The whole file: a row for each option, in the order of its declaration."""
    own = (f"| `{name}` | {_default(name)} | {meaning(name)} |\n" for name in OPTIONS)
    renamed = (
        f"| `{name}` | {_words(each.words)} | `{each.name}` |\n" for name, each in RENAMED.items()
    )
    understood = (
        f"| `{name}` | {_values(each.values)} | {each.meaning} |\n"
        for name, each in UNDERSTOOD.items()
    )
    return _HEAD + "".join(own) + _VLLM + "".join([*renamed, *understood])


def _words(words: Mapping[str, Any]) -> str:
    """How values are written there, and here."""
    told = ", ".join(f"`{theirs!r}` is `{here!r}`" for theirs, here in words.items())
    return told or "the same"


def _values(values: Sequence[Any]) -> str:
    return ", ".join(f"`{value!r}`" for value in values) or "any"


def _default(name: str) -> str:
    """An option's default as Python has it, and what None stands for."""
    default = OPTIONS[name].default
    return f"`None`: {default_of(name)}" if default is None else f"`{default!r}`"


def main() -> int:
    return keep(PATH, page, COMMAND, __doc__)


if __name__ == "__main__":
    sys.exit(main())
