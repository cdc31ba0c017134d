"""The HTTP endpoint: OpenAI's routes over an engine client."""
