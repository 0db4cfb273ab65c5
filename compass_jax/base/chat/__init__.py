"""Chat formats: parsers of a model's answer into a thought, a content and tool calls."""
