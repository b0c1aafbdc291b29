"""Proposers that only tests use. They are in no table: a test builds them."""
