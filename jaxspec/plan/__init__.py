"""Step plans: the shapes of programs, and the packed arrays from host to device. No JAX."""
