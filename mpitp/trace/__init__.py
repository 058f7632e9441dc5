"""Watching a model from outside: layers and groups are stood in for, and know nothing of it."""
