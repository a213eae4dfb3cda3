"""Spells items as semantic ids."""
