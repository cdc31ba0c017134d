"""What is found out about a chat template by rendering with it."""
