"""The controller: its loop, the members it knows, the version under way."""
