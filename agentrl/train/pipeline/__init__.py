"""Groups of episodes: admission, scheduling, filters, the journal, staleness."""
