"""What travels on each link, in which order, in how many operations: streams cut into Chunks."""
