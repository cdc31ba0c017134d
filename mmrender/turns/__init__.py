"""Where an assistant's turn begins and where it ends, in rendered text and in tokens."""
