"""From what members report, and the plan, to what each member does."""
