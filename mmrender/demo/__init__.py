"""The demonstration: `mmrender demo`, or `python -m mmrender.demo`."""
