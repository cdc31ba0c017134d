"""Rollouts: a model that is sampled over many turns, in an environment, many trajectories at once."""
