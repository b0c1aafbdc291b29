"""Attention over paged keys and values, by the queries of a verify and of prompt chunks."""
