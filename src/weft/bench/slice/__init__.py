"""`weft bench slice`: the work of one rank of a large case, on one device."""
