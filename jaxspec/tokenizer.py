"""Text to tokens and back: a checkpoint's tokenizer, its chat template, and streamed text."""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder puts for bytes that are no character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a checkpoint folder, from its `tokenizer.json` and settings files.

    `eos_ids` are the ids that end an output, ascending: those of generation_config.json,
    config.json (and its text_config) and the tokenizer's own. All of them count: a chat model
    ends a turn with another token than a text.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read `folder`. FileNotFoundError without a tokenizer.json, ValueError if it is broken."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"Text needs a tokenizer, but {folder} has no tokenizer.json. Copy the "
                'checkpoint\'s there, or pass token ids: {"prompt_token_ids": [...]}.'
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"A tokenizer.json must be one that `tokenizers` {tokenizers.__version__} reads, "
                f"but {path} gave: {error}. Download it again, or update `tokenizers`."
            ) from error
        # The file may carry the padding and truncation of training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.has_byte_tokens = self._tokenizer.token_to_id("<0x00>") is not None
        self._folder = folder
        settings = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json"))
        self._special_tokens |= _special_tokens(settings)
        self._templates = _chat_templates(folder, settings)
        self.eos_ids = self._find_eos_ids()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, with what the tokenizer puts around a text (such as BOS)."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids without a token (a padded vocabulary has some) give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The token ids of a conversation; arguments and errors as in `render_chat`."""
        text = self.render_chat(messages, tools, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)  # the template writes BOS itself

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template.

        `messages` are `{"role": ..., "content": ...}`; `kwargs` are the template's own
        switches, such as `enable_thinking=False`. ValueError if the checkpoint has no template
        or the template refuses the conversation. Templates come with checkpoints, so they run
        in a sandbox and cannot reach files, attributes of Python objects, or change arguments.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(
                f"A chat needs a chat template, but {self._folder} has none (chat_template.jinja, "
                "or chat_template in tokenizer_config.json). Use generate() with the text itself."
            )
        if not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                "A chat message must be a mapping with role and content, but messages="
                f'{messages!r}. Pass a list such as [{{"role": "user", "content": "Hi"}}].'
            )
        variables = {
            "messages": [_alias_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = _compile(self._templates[name])
            return template.render(variables | self._special_tokens | kwargs)
        except Exception as error:  # a template is a program: it may fail in any way it likes
            raise ValueError(
                f"The chat template of {self._folder} must accept the conversation, but it "
                f"stopped with {type(error).__name__}: {error}. Check roles, their order and "
                "contents against the template, or use generate() with the text itself."
            ) from error

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """A new incremental detokeniser, for one request."""
        return TextStream(self, skip_special_tokens)

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token stands for one byte (`<0xE2>`), as SentencePiece falls back to."""
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def _find_eos_ids(self) -> tuple[int, ...]:
        model = _read_json(self._folder / "config.json")
        generation = _read_json(self._folder / "generation_config.json")
        entries = [part.get("eos_token_id") for part in (generation, model)]
        entries.append((model.get("text_config") or {}).get("eos_token_id"))
        if "eos_token" in self._special_tokens:
            entries.append(self._tokenizer.token_to_id(self._special_tokens["eos_token"]))
        found = set()
        for entry in entries:
            found.update(entry if isinstance(entry, list) else [entry])
        return tuple(sorted(found - {None}))


class TextStream:
    """Turns token ids into text as they come.

    All that `push` and `flush` return, joined, is `decode` of all ids, however they were split.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        """Start empty; `Tokenizer.stream` is the way to make one."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Only the newest ids are decoded again, not the whole output. They follow a few whose text
        # is out: some decoders treat the first token of a text its own way.
        self._window: list[int] = []
        self._num_context = 0  # ids of the window whose text was out when the others came
        self._num_shown = 0  # characters of the window's text that are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain; bytes that may still become a character wait."""
        self._window.extend(ids)
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        certain = max(self._certain_length(text), self._num_shown)
        shown = text[self._num_shown : certain]
        self._num_shown = certain
        if shown and certain == len(text):
            # A character ends here, so the ids since the last such place can stand alone.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_shown = len(self._tokenizer.decode(self._window, self._skip_special_tokens))
        return shown

    def flush(self) -> str:
        """The text still waiting, at the end of the output: unfinished bytes come out as U+FFFD."""
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        shown = text[self._num_shown :]
        self._window, self._num_context, self._num_shown = [], 0, 0
        return shown

    def _certain_length(self, text: str) -> int:
        """How much of the window's `text` no further id can change."""
        if self._tokenizer.has_byte_tokens:
            # One bad byte makes the decoder give up the whole run of byte tokens it is in.
            end = len(self._window)
            while end and self._may_be_in_a_run(self._window[end - 1]):
                end -= 1
            if end < len(self._window):
                return len(self._tokenizer.decode(self._window[:end], self._skip_special_tokens))
        # Unfinished bytes at the end are one character; those before it are settled.
        return len(text.removesuffix(_UNFINISHED))

    def _may_be_in_a_run(self, token_id: int) -> bool:
        is_silent = not self._tokenizer.decode([token_id], self._skip_special_tokens)
        return is_silent or self._tokenizer.is_byte_token(token_id)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} must be JSON, but: {error}. Download it again, or delete it to do without."
        ) from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The entries such as bos_token and eos_token, as text or as `{"content": text}`."""
    found = {}
    for name, token in settings.items():
        if isinstance(token, Mapping):
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str) and token:
            found[name] = token
    return found


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name, in the order of transformers: own file, settings, old file."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return {"default": own.read_text(encoding="utf-8")}
    source = settings.get("chat_template")
    source = source or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return {"default": source} if source else {}


def _alias_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under the names that templates use, whichever the message has."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if message.get(name) is not None:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; here it only lets its content through."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as the models were trained on; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
