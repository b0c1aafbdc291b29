"""Step plans as packed arrays, shapes of programs, limits of the scheduler. No JAX."""
