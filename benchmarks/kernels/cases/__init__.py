"""The ops at the shapes of published models."""
