"""The HTTP server for OpenAI's clients: requests become work for the batcher, tokens become
answers."""
