"""A small engine in pure torch behind the SGLang protocol."""
