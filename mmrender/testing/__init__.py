"""Tools for testing renderers: generated conversations, reference implementations, parity."""
