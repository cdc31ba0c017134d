"""Recorded runs of real agents, played against any gateway: `python -m mmrender.testing.agents URL`."""
