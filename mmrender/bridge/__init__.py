"""Appending new messages to what was sampled, without re-tokenizing it."""
