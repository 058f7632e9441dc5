"""Programs that run in another Python, which has PyTorch, to be measured in turn with ours. They don't import mpitp."""
