"""HTTP server for OpenAI clients: requests become jobs of the batcher, tokens responses."""
