"""Chat formats, one family a file: messages as text, and what stands between two turns of the policy."""
