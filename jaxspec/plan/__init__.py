"""Step plans, as packed arrays; shapes of programs and limits of the scheduler. No JAX."""
