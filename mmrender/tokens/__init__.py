"""From traced text to token ids, their owners, and the sampled ones."""
