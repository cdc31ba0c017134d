"""Reinforcement learning with pictures, end to end: a small vision-language model learns a game."""
