"""One rendering: template, tokens and media put together, and remembered."""
