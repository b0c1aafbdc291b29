"""A tokenizer whose tokens are words, for models without one."""

import json
from pathlib import Path

from benchmarks.engine.http_processes import LETTERS, write_tokenizer


def word(number: int) -> str:
    """Return the text of an id, without the space before it."""
    letters = []
    while number or not letters:
        number, digit = divmod(number, len(LETTERS))
        letters.append(LETTERS[digit])
    return "".join(letters)


def write_words(folder: Path, vocab: int) -> None:
    """Write tokenizer.json with `word` for each id; it encodes words, too."""
    write_tokenizer(folder, vocab)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["ignore_merges"] = True
    content["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(content))
