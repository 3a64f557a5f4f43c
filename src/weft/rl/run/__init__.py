"""The processes of a run, what they say to each other, and the record of what happened."""
