"""Kernels that are compiled by themselves, before the programs that they are part of."""

import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jaxspec.runner.programs import kernels
from jaxspec.runner.programs.kernels import compile_kernels, kernels_of


def lowered(function, *args):
    return jax.jit(function).lower(*args)


def test_a_program_without_kernels_has_none():
    program = lowered(lambda x: x + jnp.sort(x), jnp.ones(3))
    assert kernels_of(program.compiler_ir("stablehlo")) == {}


def test_a_module_compiles_here_and_a_broken_one_is_logged(caplog):
    caplog.set_level(logging.INFO, kernels.__name__)
    program = lowered(lambda x: x + 1, jnp.ones(3))
    text = str(program.compiler_ir("stablehlo")).encode()
    kernels._compile(text)
    assert caplog.text == ""
    kernels._compile(b"no module")
    assert "a kernel is compiled with its program" in caplog.text


def test_each_kernel_is_asked_for_once(monkeypatch):
    asked, pool = [], ThreadPoolExecutor(1)
    gpu = type("Gpu", (), {"platform": "gpu"})
    monkeypatch.setattr(kernels.device, "default_device", lambda: gpu)
    monkeypatch.setattr(kernels, "_asked", set())
    monkeypatch.setattr(kernels, "_pool", lambda: pool)
    monkeypatch.setattr(kernels, "_compile", asked.append)
    program = lowered(lambda x: x, jnp.ones(3))
    for found in ({"one": b"1", "two": b"2"}, {"two": b"2", "three": b"3"}):
        monkeypatch.setattr(kernels, "kernels_of", lambda module, found=found: found)
        compile_kernels(program)
    pool.shutdown()
    assert asked == [b"1", b"2", b"3"]
