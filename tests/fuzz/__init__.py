"""Hostile and damaged inputs for every reader: see scripts/fuzz."""
