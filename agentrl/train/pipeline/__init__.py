"""Sampling while the learner trains: admission of groups, episodes in the background, staleness."""
