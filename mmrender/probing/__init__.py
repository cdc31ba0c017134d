"""Findings about a chat template, made by rendering with it."""
