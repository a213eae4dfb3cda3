"""Rooms that never import each other; they meet only through Redis queues and artifacts."""
