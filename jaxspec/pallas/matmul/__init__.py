"""Products of a weight, with what comes before and after them."""
