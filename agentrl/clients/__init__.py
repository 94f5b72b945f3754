"""Clients of services that others run: one HTTP client with limits and retries, and models behind chat completions."""
