"""Layouts and recipes from texts, files, traced loaders and reported columns."""
