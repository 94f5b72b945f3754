"""The runner: the program inside a sandbox. Standard library only; it is read as text and never imported."""
