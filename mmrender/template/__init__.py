"""Chat templates, run with strings that remember their origin, and the probes of a template."""
