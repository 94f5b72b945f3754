"""One file a tool-call syntax."""
