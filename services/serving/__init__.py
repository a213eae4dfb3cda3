"""Answers with recommendations."""
