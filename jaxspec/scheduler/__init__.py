"""The scheduler: chooses the requests of each step and allocates slots and pages. No JAX."""
