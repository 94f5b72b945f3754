"""Start of engine processes: the embedded engine and SGLang."""
