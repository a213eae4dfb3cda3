"""Tensor operations: a readable torch reference of each, faster ones per device. Knows torch and nothing else."""
