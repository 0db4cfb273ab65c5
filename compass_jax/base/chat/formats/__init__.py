"""One file a chat format, each with a `FORMAT` (base/chat/base.py)."""
