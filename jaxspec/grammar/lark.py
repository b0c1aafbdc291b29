"""Parts of grammars in llguidance's dialect of Lark."""

import json
import re
from typing import Any

from jaxspec.grammar.library import library, refused
from jaxspec.text.tokenizer import Tokenizer

TEXT = "/(?s:.*)/"
"""Any text without special tokens."""

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def token(token_id: int) -> str:
    return f"<[{token_id}]>"


def literal(text: str, tokenizer: Tokenizer) -> str:
    """Return the symbols of a text, in which special tokens match by their ids alone."""
    special = tokenizer.special_tokens
    found = sorted((each for each in special if each in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    return " ".join(
        token(special[part]) if part in special else quoted(part) for part in parts if part
    )


def text_without(text: str) -> str:
    """Return the terminal of texts that do not include `text`."""
    escaped = "".join(rf"\x{{{ord(each):x}}}" for each in text)
    return f"{TEXT} & ~/(?s:.*){escaped}(?s:.*)/"


def choice(texts: list[str]) -> dict[str, Any]:
    """Return the grammar of one of several texts."""
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, texts))}\n"}


def regex(pattern: str) -> dict[str, Any]:
    """Return the grammar of the texts that a regex matches as a whole."""
    return {"lark_grammar": f"start: /{terminal(pattern)}/\n"}


def terminal(pattern: str) -> str:
    r"""Return a regex in Rust's syntax, in which \d and \w are ASCII."""
    return library().regex_to_lark(pattern, use_ascii="dw").replace("\n", "\\n")


def grammar(source: str) -> dict[str, Any]:
    """Return a grammar in Lark's syntax, or in the EBNF of llama.cpp and XGrammar.

    Raises:
        ValueError: it is EBNF with an error, or with a part without a counterpart.
    """
    if _EBNF_RULE.search(source) is None:
        return {"lark_grammar": source}
    library()
    from llguidance.gbnf_to_lark import gbnf_to_lark  # a part of the optional dependency

    try:
        return {"lark_grammar": gbnf_to_lark(source)}
    except Exception as error:  # of any type, since the converter checks little
        raise refused(str(error) or type(error).__name__, "grammar") from error
