"""Structural tags: text in which a trigger begins a part of a given form, as in vLLM.

Both forms of it are read: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` and
`{"type": "structural_tag", "format": {...}}`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.checks import shown
from jaxspec.grammar import lark
from jaxspec.grammar.json_schema import schema_of
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.text.tokenizer import Tokenizer

_MAX_TAGS = 1000


def tag_grammars(
    tag: Mapping[str, Any], params: StructuredOutputsParams, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return llguidance's grammars of a structural tag; the first is the whole.

    Raises:
        ValueError: the tag is incomplete, or has a format without a counterpart.
    """
    writer = _Writer(params, tokenizer)
    start = writer.format(_format_of(tag))
    rules = "\n".join([f"start: {start}", *writer.rules])
    return [{"lark_grammar": f"{rules}\n"}, *writer.grammars]


def _format_of(tag: Mapping[str, Any]) -> Any:
    if "structures" not in tag:
        return _field(tag, "format", dict)
    tags = [
        {
            "begin": _field(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": _field(each, "end", str),
        }
        for each in _field(tag, "structures", list)
    ]
    return {"type": "triggered_tags", "triggers": _field(tag, "triggers", list), "tags": tags}


def _field(part: Any, name: str, kind: type) -> Any:
    value = part.get(name) if isinstance(part, Mapping) else None
    if not isinstance(value, kind):
        raise ValueError(
            f"A part of a structural tag must have {name!r} of the type {kind.__name__}, got "
            f"{shown(part)}. Add it."
        )
    return value


@dataclasses.dataclass
class _Writer:
    """Writes the formats of a structural tag as Lark rules."""

    params: StructuredOutputsParams
    tokenizer: Tokenizer
    rules: list[str] = dataclasses.field(default_factory=list)
    grammars: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def format(self, part: Any) -> str:
        """Return the symbols of a format."""
        kind = _field(part, "type", str)
        writers: dict[str, Callable[[Any], str]] = {
            "const_string": lambda part: self._literal(_field(part, "value", str)),
            "json_schema": lambda part: self._schema(part.get("json_schema", True)),
            "regex": lambda part: self._side(lark.regex(_field(part, "pattern", str))),
            "grammar": lambda part: self._side(lark.grammar(_field(part, "grammar", str))),
            "sequence": self._sequence,
            "or": lambda part: self._either(map(self.format, _field(part, "elements", list))),
            "any_text": lambda part: self._terminal(lark.TEXT),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated_tags,
        }
        if kind not in writers:
            raise ValueError(
                f"A format of a structural tag must be one of {', '.join(writers)}, got "
                f"{shown(kind)}. Write it as a regex or grammar."
            )
        return writers[kind](part)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, regex: str) -> str:
        name = f"PART_{len(self.rules)}"
        self.rules.append(f"{name}: {regex}")
        return name

    def _either(self, parts: Any) -> str:
        return self._rule(" | ".join(parts))

    def _literal(self, text: str) -> str:
        return lark.literal(text, self.tokenizer)

    def _schema(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise ValueError(f"json_schema must be a JSON object, got {shown(schema)}.")
        return self._side({"json_schema": schema_of(self.params, schema)})

    def _side(self, grammar: dict[str, Any]) -> str:
        name = f"side_{len(self.grammars)}"
        self.grammars.append(grammar | {"name": name})
        return f"@{name}"

    def _sequence(self, part: Any) -> str:
        elements = _field(part, "elements", list)
        if any(isinstance(e, Mapping) and e.get("type") == "any_text" for e in elements[:-1]):
            raise ValueError(
                "any_text must be the last element of a sequence, because nothing tells where it "
                "ends. Put it into a tag with an end."
            )
        return self._rule(" ".join(map(self.format, elements)))

    def _tag(self, part: Any) -> str:
        return self._rule(self._symbols(part, _field(part, "begin", str)))

    def _symbols(self, part: Any, begin: str) -> str:
        """Return the symbols of a tag after those of its trigger."""
        content, end = _field(part, "content", dict), _end(part)
        if content.get("type") != "any_text":
            return f"{self._literal(begin)} {self.format(content)} {self._literal(end)}"
        first = next((each for each in self.tokenizer.special_tokens if end.startswith(each)), None)
        if not end or first is not None:
            text = f"{self._terminal(lark.TEXT)} {self._literal(end)}"
        else:
            text = self._rule(lark.TEXT, f"[suffix={lark.quoted(end)}]")
        return f"{self._literal(begin)} {text}"

    def _triggered_tags(self, part: Any) -> str:
        triggers, tags = _field(part, "triggers", list), _field(part, "tags", list)
        _check_tags(triggers, tags)
        bodies = [self._triggered(trigger, tags) for trigger in triggers]
        tag, rest = self._either(bodies), self._terminal(lark.TEXT)
        if part.get("stop_after_first"):
            return tag if part.get("at_least_one") else self._either([tag, rest])
        return f"{tag}{'+' if part.get('at_least_one') else '*'} {rest}"

    def _triggered(self, trigger: str, tags: Sequence[Any]) -> str:
        """Return a rule of text, a trigger, and the rest of one of its tags."""
        begun = [each for each in tags if each["begin"].startswith(trigger)]
        rests = [self._rule(self._symbols(t, t["begin"][len(trigger) :])) for t in begun]
        special = self.tokenizer.special_tokens
        if any(each in trigger for each in special):
            head = f"{self._terminal(lark.TEXT)} {self._literal(trigger)}"
        else:
            head = self._rule(lark.TEXT, f"[suffix={lark.quoted(trigger)}]")
        return self._rule(f"{head} {self._either(rests)}")

    def _separated_tags(self, part: Any) -> str:
        tags = _field(part, "tags", list)
        _check_tags([""], tags)
        tag = self._either(map(self._tag, tags))
        separator = self._literal(_field(part, "separator", str))
        more = "" if part.get("stop_after_first") else f" ({separator} {tag})*"
        return self._rule(f"{tag}{more}" if part.get("at_least_one") else f"({tag}{more})?")


def _check_tags(triggers: Sequence[Any], tags: Sequence[Any]) -> None:
    """Check that each tag begins with a trigger, and each trigger begins a tag."""
    begins = [_field(tag, "begin", str) for tag in tags]
    if not 0 < len(tags) <= _MAX_TAGS or not 0 < len(triggers) <= _MAX_TAGS:
        raise ValueError(
            f"A structural tag must have 1 to {_MAX_TAGS:,} tags and triggers, got {len(tags):,} "
            f"and {len(triggers):,}."
        )
    if any(not isinstance(trigger, str) for trigger in triggers):
        raise ValueError(f"triggers must be texts, got {shown(triggers)}.")
    for begin in begins:
        if not begin or not any(begin.startswith(trigger) for trigger in triggers):
            raise ValueError(
                f"A tag must begin with one of the triggers {shown(triggers)}, got {shown(begin)}. "
                "Add a trigger that begins it."
            )
    for trigger in triggers:
        if not any(begin.startswith(trigger) for begin in begins):
            raise ValueError(f"A trigger must begin a tag, got {shown(trigger)}. Leave it out.")


def _end(part: Any) -> str:
    end = part.get("end", "") if isinstance(part, Mapping) else ""
    if not isinstance(end, str):
        raise ValueError(f"The end of a tag must be a text, got {shown(end)}.")
    return end
