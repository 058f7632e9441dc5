"""`mpitp serve`: an OpenAI-style server in front of the engine, on any number of ranks.

HTTP lives in a thread of rank 0, the engine in its main thread; the two talk by queues. Nothing is imported here, so
that `mpitp serve --help` needs neither NumPy nor a web framework.
"""
