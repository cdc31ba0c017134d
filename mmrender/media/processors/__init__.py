"""Image processors: native ones, and an adapter over Transformers' processors."""
