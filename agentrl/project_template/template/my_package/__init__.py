"""A policy learns to answer questions about invented people by looking them up in a directory."""
