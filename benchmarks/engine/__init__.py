"""Whole engines, as a user would run them."""
