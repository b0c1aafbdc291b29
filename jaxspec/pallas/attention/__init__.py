"""Attention over paged keys and values: of a verify's queries and of prompt chunks."""
