"""Model-free beam search over the item trie."""
