"""Random forms of structured outputs: schemas, regexes and choices."""

import numpy as np

NAMES = "a", "id", "name", 'x "y"', "é", "values"
WORDS = "red", "green", "blue", "x, y", "né", "日本", "a\nb"
PIECES = "[a-c]{1,3}", r"\d+", "(?:ab|c)", r"[^\n]{0,4}", "é?", r"\w", "-", "(?:x|yz){2}", " "


def random_forms(count, seed):
    """Dicts of `StructuredOutputsParams`, a third of each kind."""
    random = np.random.default_rng(seed)
    makers = _schema_form, _regex_form, _choice_form
    return [makers[number % 3](random) for number in range(count)]


def _schema_form(random):
    return {"json": _schema(random, depth=2), "max_whitespace": int(random.integers(1, 9))}


def _regex_form(random):
    pieces = random.choice(PIECES, random.integers(1, 5))
    return {"regex": "".join(pieces) + "(?:!|end)"}


def _choice_form(random):
    return {"choice": random.choice(WORDS, random.integers(1, 5), replace=False).tolist()}


def _schema(random, depth):
    makers = [_scalar, _enum] + ([_object, _object, _array, _union] if depth else [])
    return makers[random.integers(len(makers))](random, depth - 1)


def _scalar(random, depth):
    kind = random.choice(["string", "integer", "number", "boolean", "null", "short"])
    if kind == "short":
        return {"type": "string", "maxLength": int(random.integers(1, 6))}
    if kind == "integer" and random.random() < 0.5:  # every other one has masks of the host
        bounds = {"type": "integer", "minimum": 0, "maximum": 150}
        return bounds | {"multipleOf": 3} if random.random() < 0.5 else bounds
    return {"type": str(kind)}


def _enum(random, depth):
    values = [*WORDS, 1, -2.5, None, True]
    picked = random.choice(len(values), random.integers(1, 4), replace=False)
    return {"enum": [values[number] for number in picked]}


def _object(random, depth):
    names = random.choice(NAMES, random.integers(1, 4), replace=False).tolist()
    required = [name for name in names if random.random() < 0.7]
    properties = {name: _schema(random, depth) for name in names}
    found = {"type": "object", "properties": properties, "required": required}
    return found | {"additionalProperties": False}


def _array(random, depth):
    least = int(random.integers(0, 2))
    sizes = {"minItems": least, "maxItems": least + int(random.integers(1, 3))}
    return {"type": "array", "items": _schema(random, depth), **sizes}


def _union(random, depth):
    return {"anyOf": [_schema(random, depth), _scalar(random, depth)]}
