"""Training: one optimizer step, the run around it, its checkpoints and its early stops.

Nothing is imported here, so that `mpitp train --help` needs no NumPy.
"""
