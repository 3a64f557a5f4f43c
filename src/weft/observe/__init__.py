"""What a person or a tool sees of plans and events: traces, pictures, reports."""
