"""Programming problems with hidden tests."""
