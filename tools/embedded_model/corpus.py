"""Collects the training text, trains the tokenizer and writes the tokens as arrays.

The text is one source under one licence: the pure-Python standard library of the running CPython
(its tests included) and the language-reference topics of `pydoc`. Run with CPython 3.11:

    python -m tools.embedded_model.corpus WORK_DIR
"""

import argparse
import hashlib
import json
import pathlib
import re
import sysconfig

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"  # separates documents; the model's end-of-sequence token
SHUFFLE_SEED = 0

EXCLUDED_PREFIXES = (
    "site-packages/",  # other people's licences
    "encodings/",  # tables
    "ensurepip/",
    "idlelib/Icons/",
    "lib2to3/tests/",
    "config-",  # build settings of one machine
    "_sysconfigdata",
)
MAX_TEST_BYTES = 200_000
MAX_DIGIT_SHARE = 0.15
MAX_NON_ASCII_SHARE = 0.05
OTHER_LICENCES = re.compile(r"GPL|GNU General Public|Creative Commons")

# The pre-tokenizer of the Qwen tokenizers: runs of letters with one leading mark, single digits,
# punctuation with the line breaks after it, white space.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def is_wanted(path: str, text: str) -> bool:
    """Return whether `path` (relative to `Lib`) is source text, not tables, of the PSF licence."""
    if path.startswith(EXCLUDED_PREFIXES) or not text.strip():
        return False
    if "test" in path and len(text) > MAX_TEST_BYTES:
        return False
    digits = sum(char.isdigit() for char in text)
    non_ascii = sum(not char.isascii() for char in text)
    few_tables = digits <= MAX_DIGIT_SHARE * len(text) and non_ascii <= MAX_NON_ASCII_SHARE * len(
        text
    )
    return few_tables and not OTHER_LICENCES.search(text)


def collect_documents(lib: pathlib.Path) -> dict[str, str]:
    """The documents by name: a path relative to `lib`, or `pydoc_data/topics.py:TOPIC`."""
    documents = {}
    for file in sorted(lib.rglob("*.py")):
        path = file.relative_to(lib).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # test files that are broken on purpose
        if path == "pydoc_data/topics.py":
            namespace: dict = {}
            exec(text, namespace)  # noqa: S102 - a dict literal of the standard library
            documents |= {
                f"{path}:{name}": topic for name, topic in sorted(namespace["topics"].items())
            }
        elif is_wanted(path, text):
            documents[path] = text
    return documents


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(name: str) -> bool:
    """About 2 % of the documents, chosen by name so that the choice never moves."""
    return int(digest(name)[:8], 16) % 50 == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` entries; every byte string can be encoded, losslessly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """[num_tokens] uint16: END_OF_TEXT, document, END_OF_TEXT, document, …, END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [end]
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [*encoding.ids, end]
    return np.asarray(ids, np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=pathlib.Path)
    work_dir = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)

    documents = collect_documents(pathlib.Path(sysconfig.get_path("stdlib")))
    names = sorted(documents, key=digest)
    training = [documents[name] for name in names if not is_held_out(name)]
    held_out = [documents[name] for name in names if is_held_out(name)]
    np.random.default_rng(SHUFFLE_SEED).shuffle(training)

    tokenizer = train_tokenizer(training)
    tokenizer.save(str(work_dir / "tokenizer.json"), pretty=False)
    sizes = {"documents": len(names), "held_out_documents": len(held_out)}
    for split, texts in (("train", training), ("held_out", held_out)):
        tokens = encode_documents(tokenizer, texts)
        np.save(work_dir / f"{split}.npy", tokens)
        sizes |= {
            f"{split}_bytes": sum(len(text.encode()) for text in texts),
            f"{split}_tokens": len(tokens),
        }
    (work_dir / "corpus.json").write_text(json.dumps(sizes, indent=1) + "\n")
    lines = [
        f"{digest(documents[name])} {'held-out' if is_held_out(name) else 'train'} {name}"
        for name in sorted(names)
    ]
    (work_dir / "MANIFEST.txt").write_text("\n".join(lines) + "\n")
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
