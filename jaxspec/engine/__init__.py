"""Step loop, sessions of synchronous and asynchronous callers, and admission. Imports no JAX."""
