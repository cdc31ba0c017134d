"""The beginning and the end of an assistant's turn."""
