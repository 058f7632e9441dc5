"""Optimizer, learning-rate schedule and the global gradient norm."""
