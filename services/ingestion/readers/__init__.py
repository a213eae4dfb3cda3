"""Readers of files and folders: what a file is, and its rows a chunk at a time."""
