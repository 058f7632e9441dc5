"""`mpitp plan`: what a run would do, worked out without running it."""
