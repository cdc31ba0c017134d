"""Looking at tokens."""
