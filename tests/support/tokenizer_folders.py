"""Folders of tokenizers that tests change."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

FIXTURES = Path(__file__).parents[1] / "fixtures"
BYTES = FIXTURES / "tokenizer_bytes"


def with_bytes(fixture, folder):
    """A copy of a fixture, or a folder, with the byte tokenizer: any bytes come of its weights."""
    for part in (FIXTURES / fixture, BYTES):
        shutil.copytree(part, folder, dirs_exist_ok=True)
    return folder


def folder_with(tmp_path, **files):
    """A copy of the byte tokenizer's tokenizer.json, with these files beside it."""
    shutil.copy(BYTES / "tokenizer.json", tmp_path)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return tmp_path


def sentencepiece_folder(tmp_path):
    """A tokenizer that decodes as SentencePiece's do: byte tokens, and no space at the start."""
    words = ["<unk>", "▁", "▁Hello", "▁world", "lo", "▁▁", "你", "�", "</s>"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
