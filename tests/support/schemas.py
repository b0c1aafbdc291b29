"""Generated JSON schemas, of the keywords that grammars support."""

from hypothesis import strategies as st

_NAMES = st.text("abxyz_ é", min_size=1, max_size=4)
_VALUES = st.one_of(_NAMES, st.integers(-9, 9), st.booleans(), st.none())
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.just({"type": "number"}),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    st.sampled_from(["^[a-c]+$", "^x[0-9]{2}$", "^(ab|c)d*$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.lists(
        st.one_of(_NAMES, st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    st.builds(lambda value: {"const": value}, st.one_of(_NAMES, st.integers(), st.none())),
)


def _objects(parts):
    def build(properties, data, is_closed):
        names = sorted(properties)
        schema = {"type": "object", "properties": {name: properties[name] for name in names}}
        schema["required"] = [
            name for name, is_needed in zip(names, data, strict=False) if is_needed
        ]
        return schema | ({"additionalProperties": False} if is_closed else {})

    properties = st.dictionaries(_NAMES, parts, max_size=4)
    return st.builds(
        build, properties, st.lists(st.booleans(), min_size=4, max_size=4), st.booleans()
    )


def _arrays(parts):
    return st.builds(
        lambda items, least, more: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        parts,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def schemas():
    return st.recursive(
        _LEAVES,
        lambda parts: st.one_of(
            _objects(parts),
            _arrays(parts),
            st.lists(parts, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
        ),
        max_leaves=6,
    )


def values_of(schema):
    """Values that a schema of `schemas` allows, with the properties in its order."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema:
        return st.one_of([values_of(each) for each in schema["anyOf"]])
    return _OF_TYPE[schema["type"]](schema)


def _string(schema):
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True).filter(
            lambda text: "\n" not in text
        )
    alphabet = "abXYZ 09é你🙂/'"
    return st.text(alphabet, min_size=schema["minLength"], max_size=schema["maxLength"])


def _object(schema):
    parts = {name: values_of(part) for name, part in schema["properties"].items()}
    needed = {name: parts[name] for name in parts if name in schema["required"]}
    optional = {name: parts[name] for name in parts if name not in schema["required"]}
    made = st.fixed_dictionaries(needed, optional=optional)
    return made.map(lambda value: {name: value[name] for name in parts if name in value})


_OF_TYPE = {
    "boolean": lambda schema: st.booleans(),
    "null": lambda schema: st.none(),
    "integer": lambda schema: st.integers(schema["minimum"], schema["maximum"]),
    "number": lambda schema: st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
    "string": _string,
    "object": _object,
    "array": lambda schema: st.lists(
        values_of(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"]
    ),
}
