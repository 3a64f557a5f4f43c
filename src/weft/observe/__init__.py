"""Views of plans and events for people and tools: traces, pictures, reports."""
