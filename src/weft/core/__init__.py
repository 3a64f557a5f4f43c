"""Pure planning: layouts, recipes, topologies, plans, schedules. No processes, no sockets, no torch."""
