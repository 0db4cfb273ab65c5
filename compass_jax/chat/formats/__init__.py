"""One file a chat format, each with a `FORMAT` (chat/base.py)."""
