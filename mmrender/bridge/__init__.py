"""Appending new messages to sampled tokens, without re-tokenizing them."""
