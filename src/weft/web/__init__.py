"""Pages for a browser: the dashboard of a fleet, and reports in one file."""
