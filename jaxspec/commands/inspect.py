"""`python -m jaxspec inspect MODEL`: report a model's structure, memory needs and support."""

import argparse
from collections.abc import Sequence

from jaxspec.inspection import inspect
from jaxspec.options.arguments import (
    ENGINE_OPTIONS,
    CommandParser,
    add_engine_options,
    add_model,
    add_speculation,
    engine_options,
)


def main(words: Sequence[str]) -> int:
    """Print the report; return 1 if the model is refused, else 0."""
    found = inspect(**engine_options(parser().parse_args(words)))
    print(found)
    return 1 if found.refused else 0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec inspect",
        usage="python -m jaxspec inspect [options] [MODEL]",
        description="Report a model's structure and memory, how many requests fit on this device,\n"
        "and any reason to refuse it. No weights are loaded or downloaded.",
        epilog="exit status: 0 supported; 1 refused; 2 invalid arguments or input",
    )
    add_model(
        made,
        "a folder with config.json, with or without weights; a config.json; a GGUF file; or a "
        "Hugging Face hub id, whose config.json is downloaded",
    )
    add_engine_options(made, *ENGINE_OPTIONS)
    add_speculation(made)
    return made
