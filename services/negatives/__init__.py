"""Draws negatives ahead of the training that needs them."""
