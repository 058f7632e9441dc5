"""A job's life around a verb: what starts its ranks, signals, standard input, and the word on a failure."""
