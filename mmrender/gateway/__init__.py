"""An endpoint for agents as they are: it answers three protocols in tokens, and records the sampled turns."""
