"""GGUF files that hold a tokenizer and nothing else."""

import json

import gguf
from gguf import TokenType
from gguf_files import add_entry

NORMAL, CONTROL, USER = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED


def write_tokenizer(path, model, tokens, types=None, **entries):
    """A file with these tokens; `entries` are of `tokenizer.ggml.`, or begin with `tokenizer.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types or [NORMAL] * len(tokens))
    for name, value in entries.items():
        name = name.replace("__", ".")
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        add_entry(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_byte_level(path, tokenizer, **entries):
    """A tokenizer of the library `tokenizers`, of GPT-2's kind, as llama.cpp writes it."""
    published = json.loads(tokenizer.to_str())
    ids = published["model"]["vocab"]
    marked = {token["content"]: token for token in published["added_tokens"]}
    ids |= {content: token["id"] for content, token in marked.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [(CONTROL if marked[t]["special"] else USER) if t in marked else NORMAL for t in tokens]
    merges = [" ".join(pair) for pair in published["model"]["merges"]]
    return write_tokenizer(path, "gpt2", tokens, kinds, merges=merges, **entries)
