"""`weft bench scaling`: how the rate of a version grows with senders, in a lab with rate-limited NICs."""
