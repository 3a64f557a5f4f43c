"""Views of a run: live lines, and a page at its end."""
