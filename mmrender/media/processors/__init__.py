"""Image processors: native ones, and an adapter over those of Transformers."""
