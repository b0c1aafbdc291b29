"""How a row of logits is cut into parts whose sums are made apart."""

PART = 8192
"""Neighbouring logits of a part; the last one of a row has what is left."""

TILE = 512
"""Logits that a kernel loads at a time; a row's last tile may overlap the one before."""
