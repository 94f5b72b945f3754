"""One file a chat format."""
