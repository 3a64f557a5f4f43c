"""The processes of a run, their messages, and the record of what happened."""
