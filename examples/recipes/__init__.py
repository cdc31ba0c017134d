"""One program for each trainer: geometry questions with figures, from a data set of the hub."""
