"""HTTP server for OpenAI clients: converts requests into jobs for the batcher, and tokens into
responses.
"""
