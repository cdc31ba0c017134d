"""Chat templates, run with strings that remember where they came from."""
