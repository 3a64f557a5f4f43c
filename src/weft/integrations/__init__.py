"""Adapters between weft and the frameworks people use."""
