"""Which implementation an op runs, and that one can see it."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import dispatch


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_chosen", {})


def on(monkeypatch, platform="gpu", capability="9.0", version=(0, 11, 2)):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    monkeypatch.setattr(jax, "__version_info__", version)


def test_a_kernel_runs_on_hopper(monkeypatch):
    on(monkeypatch)
    assert dispatch.runs_kernel("op", None, rows=1)
    assert dispatch.implementations() == {"op": ("kernel",)}


@pytest.mark.parametrize(
    "machine",
    [
        {"platform": "cpu"},
        {"capability": "8.0"},
        {"version": (0, 10, 2)},
        {"version": (0, 12, 0)},
    ],
)
def test_elsewhere_xla_runs_and_a_hopper_without_its_kernels_warns(monkeypatch, machine, caplog):
    on(monkeypatch, **machine)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        assert not dispatch.runs_kernel("op", None, rows=1)
    assert dispatch.implementations()["op"][0].startswith("XLA: the ")
    assert caplog.records[0].levelname == ("WARNING" if "version" in machine else "INFO")


def test_operands_no_kernel_takes_are_reported_once(monkeypatch, caplog):
    on(monkeypatch)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for why_not in (None, "heads of 5", None, "heads of 5"):
            assert dispatch.runs_kernel("op", why_not, rows=1) == (why_not is None)
    assert dispatch.implementations() == {"op": ("kernel", "XLA: heads of 5")}
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "op runs as kernel"),
        ("WARNING", "op runs as XLA: heads of 5"),
    ]


def test_a_reference_that_is_preferred_warns_nobody(monkeypatch, caplog):
    on(monkeypatch)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        assert not dispatch.runs_kernel("op", "it is faster", rows=1, by_choice=True)
    assert dispatch.implementations() == {"op": ("XLA: it is faster",)}
    assert [r.levelname for r in caplog.records] == ["INFO"]


def test_no_kernel_is_launched_for_no_rows(monkeypatch, caplog):
    """An empty grid is no launch, and XLA drops a reference without elements: nothing is noted."""
    on(monkeypatch)
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        assert not dispatch.runs_kernel("op", None, rows=0)
        assert not dispatch.runs_kernel("op", "heads of 5", rows=0)
    assert dispatch.implementations() == {} and not caplog.records


def test_the_default_device_decides(monkeypatch):
    on(monkeypatch)
    with jax.default_device(jax.devices("cpu")[0]):
        assert not dispatch.runs_kernel("op", None, rows=1)


def test_a_reference_runs_where_it_is_asked_for_and_is_no_choice(monkeypatch):
    on(monkeypatch)
    with dispatch.reference(longest=8):
        assert not dispatch.runs_kernel("op", None, rows=1)
        with dispatch.reference(longest=4):
            assert dispatch.longest() == 4
        assert dispatch.longest() == 8
        assert not dispatch.runs_kernel("op", None, rows=1)
    assert dispatch.implementations() == {}
    assert dispatch.runs_kernel("op", None, rows=1)


def powers(x, count, most=5, batch=1):
    """x, 2 x, 4 x ..., in an array with room for `most`."""

    def body(i):
        return x * jnp.exp(0 * x) * jnp.exp2(i.astype(jnp.float32))

    return dispatch.stacked(jnp.int32(count), most, body, batch=batch)


@pytest.mark.few(3)
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_loop_is_the_same_under_a_gradient(count, batch):
    plain = jax.jit(powers)(jnp.float32(3), count)
    with dispatch.reference(longest=1):
        bounded = jax.jit(lambda x, n: powers(x, n, batch=batch))(jnp.float32(3), count)
        total = jax.grad(lambda x, n: powers(x, n, batch=batch).sum())
        slope = jax.jit(total)(jnp.float32(3), count)
    np.testing.assert_array_equal(plain, bounded)
    np.testing.assert_array_equal(plain, 3.0 * 2.0 ** np.arange(5) * (np.arange(5) < count))
    assert slope == 2**count - 1
