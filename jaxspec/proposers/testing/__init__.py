"""Proposers for tests. They are not in `PROPOSERS`: a test builds them itself."""
