"""A model directory: its files and its tokenizer."""
