"""Tells what users would like: trains the reward model, and scores items and rollouts with it."""
