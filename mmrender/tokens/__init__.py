"""From traced text to token ids, their owners, and what was sampled."""
