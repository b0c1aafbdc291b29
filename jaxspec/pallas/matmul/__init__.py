"""Products with a weight, fused with what comes before and after them."""
