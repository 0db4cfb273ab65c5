"""Chat formats: what a model's answer means, as a thought, a content and tool calls."""
