"""The values of other options that a deterministic engine needs."""

from jaxspec.checks import shown


def check_deterministic(
    tensor_parallel_size: int, activation_dtype: str | None, state_policy: str
) -> None:
    """Refuse options of a deterministic engine that would change the order of its sums.

    Raises:
        ValueError: an option has another value than such an engine needs.
    """
    # (option, its value, allowed values, reason)
    rules = (
        (
            "tensor_parallel_size",
            tensor_parallel_size,
            (1,),
            "the order in which devices sum depends on the rows",
        ),
        (
            "activation_dtype",
            activation_dtype,
            (None,),
            "no law covers rounded activations",
        ),
        (
            "state_policy",
            state_policy,
            ("snapshot", "auto"),
            "the sums of a replay depend on its ring",
        ),
    )
    for name, value, allowed, reason in rules:
        if value not in allowed:
            raise ValueError(
                f"deterministic=True needs {name}={' or '.join(map(repr, allowed))}, got "
                f"{shown(value)}: {reason}. Change {name}, or leave deterministic out."
            )
