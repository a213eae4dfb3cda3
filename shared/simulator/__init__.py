"""Simulated people, pages and a logging policy, whose true preference is known."""
