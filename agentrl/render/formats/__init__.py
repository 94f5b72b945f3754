"""Chat formats, one file per model family."""
