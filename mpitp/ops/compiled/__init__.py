"""Compiled kernels for the passes around the matrix products: one read and one write of each array (needs Numba).

Imported only where `mpitp.backend.accelerator` says so. Each kernel does what the NumPy chain in `mpitp.ops` of the
same name does, and is tested against it. A result depends on the values and the length of a row alone, to the last bit:

- what works on single elements takes no liberties with floating point, and fused multiply-adds are written as such, so
  the vector unit and the loop over the rest round alike;
- sums over a row are the only loops whose order is left to the compiler, and they write nothing.
"""
