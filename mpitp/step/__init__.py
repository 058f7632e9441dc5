"""Stepping through one forward and backward pass of all ranks, one operation at a time."""
