"""Layouts and recipes from what people and engines have: texts, files, traced loaders, reported columns."""
