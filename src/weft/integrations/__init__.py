"""Adapters: from the frameworks people use to weft, and back."""
