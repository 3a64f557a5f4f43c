"""The trainer's side: publications, and how versions leave."""
