"""Pipeline parallelism: who computes what, and when."""
