"""One client for inference servers: render, check, call, parse."""
