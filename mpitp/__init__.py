"""mpitp: transformers whose every layer is split over MPI ranks, with forward and backward passes written by hand.

Importing this package starts nothing: no MPI, no GPU, no global setting. The usual way in is

    from mpitp.checkpoint import load_model
    from mpitp.comm import world_group
    from mpitp.layers import make_site

and docs/python.md goes on from there.
"""

__version__ = "0.1.0"
