"""docs/options.md, made of the options of `LLM` (`jaxspec.options.EngineConfig`).

python -m tools.docs.options            writes it
python -m tools.docs.options --check    ends with status 1 if it is not what would be written
"""

import argparse
import sys
from pathlib import Path

from jaxspec.options import OPTIONS, default_of, meaning

PATH = Path(__file__).parents[2] / "docs" / "options.md"
COMMAND = "python -m tools.docs.options"
_HEAD = f"""\
<!-- Made by `{COMMAND}` of jaxspec/options.py; change that. -->
# Options of `LLM`

`jaxspec.LLM(model, **options)` takes these, and `jaxspec.generate(prompts, model, **options)` too.
`python -m jaxspec --help` lists those that the command has. An option outside its range, or one
that does not go with another, is refused with the rule and what came.

| option | default | meaning |
|---|---|---|
"""


def page() -> str:
    """The whole file: a row for each option, in the order of its declaration."""
    return _HEAD + "".join(
        f"| `{name}` | {_default(name)} | {meaning(name)} |\n" for name in OPTIONS
    )


def _default(name: str) -> str:
    """An option's default as Python has it, and what None stands for."""
    default = OPTIONS[name].default
    return f"`None`: {default_of(name)}" if default is None else f"`{default!r}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    if not args.check:
        PATH.write_text(page())
    elif not PATH.exists() or PATH.read_text() != page():
        print(f"{PATH} is not what {COMMAND} writes; run it.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
