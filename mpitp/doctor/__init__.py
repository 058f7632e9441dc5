"""`mpitp doctor`: is this machine, its MPI, its BLAS and its GPUs, as mpitp needs them?"""
