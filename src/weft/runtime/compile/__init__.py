"""From what members report, and the plan, to what each of them does."""
