"""A tiny model that is built on the spot, and the demonstration that runs on it."""
