"""Generation: KV cache, sampling decided on one rank, batches of unequal prompts.

Nothing is imported here, so that `mpitp generate --help` needs no NumPy.
"""
