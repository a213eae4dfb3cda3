"""Trains and evaluates models."""
