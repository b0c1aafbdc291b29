"""A tokenizer whose tokens are words, for models without one."""

from pathlib import Path

import tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word(number: int) -> str:
    """Return the text of an id, without the space before it."""
    letters = []
    while number or not letters:
        number, digit = divmod(number, len(LETTERS))
        letters.append(LETTERS[digit])
    return "".join(letters)


def write_words(folder: Path, vocab: int) -> None:
    """Write tokenizer.json with `word` for each id, which encodes words and decodes as BPE does.

    The last 95 ids are single characters, as in every published tokenizer; grammars need them.
    """
    characters = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1))]  # a space, and what is printed
    texts = [*(f"Ġ{word(id)}" for id in range(vocab - len(characters))), *characters]
    words = {text: id for id, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], ignore_merges=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
