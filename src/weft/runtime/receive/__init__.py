"""The engine's side: where versions land, how they are verified and become visible."""
