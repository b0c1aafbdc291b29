"""No reshape infers a size from others that may be zero.

NumPy and JAX divide by the product of the other sizes to find the size written as -1. A step
without prompts has no rows at chunk ends, so `x.reshape(len(x), -1, size)` raises ZeroDivisionError
there. -1 may stand alone, which flattens, or beside positive literals.
"""

import ast
from pathlib import Path

import pytest

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent


def inferred(source):
    """The line and the text of each reshape with -1 beside a size that is no positive literal."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _reshapes(node)]
    names = {arg.id for call in calls for arg in _sizes(call) if isinstance(arg, ast.Name)}
    shapes: list[tuple[ast.expr | ast.stmt, list[ast.expr]]] = [
        (call, _sizes(call)) for call in calls
    ]
    for node in ast.walk(tree):  # shapes that have a name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            shapes += [(node, node.value.elts)] if names & targets else []
    return [
        (node.lineno, ast.unparse(node))
        for node, sizes in shapes
        if any(map(_is_inferred, sizes))
        if not all(_is_inferred(size) or _is_positive(size) for size in sizes)
    ]


def _reshapes(call):
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name == "reshape"


def _sizes(call):
    """The sizes that a call names one by one, in tuples and in sums of tuples."""
    found = []
    for each in [*call.args, *(keyword.value for keyword in call.keywords)]:
        found += _flat(each)
    is_function = isinstance(call.func, ast.Name) or ast.unparse(call.func) in (
        "jnp.reshape",
        "np.reshape",
        "lax.reshape",
        "jax.lax.reshape",
    )
    return found[1:] if is_function else found


def _flat(size):
    if isinstance(size, ast.Tuple | ast.List):
        return [each for element in size.elts for each in _flat(element)]
    if isinstance(size, ast.BinOp) and isinstance(size.op, ast.Add):
        parts = [_flat(size.left), _flat(size.right)]
        is_joined = any(isinstance(x, ast.Tuple | ast.List) for x in (size.left, size.right))
        return [*parts[0], *parts[1]] if is_joined else [size]
    return [size]


def _is_inferred(size):
    return ast.unparse(size) == "-1"


def _is_positive(size):
    return isinstance(size, ast.Constant) and isinstance(size.value, int) and size.value > 0


def test_no_size_is_inferred_from_sizes_that_may_be_zero():
    found = [
        f"{path}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in inferred(path.read_text())
    ]
    assert not found, "write the size in place of -1: " + "; ".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "x.reshape(len(x), -1, size)",
        "x.reshape(\n    rows,\n    -1,\n)",
        "x.reshape((rows, -1))",
        "x.reshape(-1, *x.shape[2:])",
        "x.reshape((-1,) + (1,) * n)",
        "x.reshape(0, -1)",
        "jnp.reshape(x, (rows, -1))",
        "np.reshape(x, shape=(-1, columns))",
        "flat = (rows, -1, size)\nx.reshape(flat)",
    ],
)
def test_the_rule_finds(source):
    assert len(inferred(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x.reshape(-1)",
        "np.reshape(x, -1)",
        "x.reshape(-1, 1, 2)",
        "x.reshape((1, -1))",
        "x.reshape(rows, columns - 1)",
        "x.reshape(rows, x[-1])",
        "y = (rows, -1)\nx.reshape(z)",
        "jnp.reshape(x, (rows, columns))",
    ],
)
def test_the_rule_passes(source):
    assert inferred(source) == []
