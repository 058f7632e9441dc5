"""Checks a layout against the one-rank model, layer by layer."""
