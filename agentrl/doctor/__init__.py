"""Diagnosis of a run from its folder: why it is dead, hangs or does not learn, with evidence and the keys to change."""
