"""Ways that bytes travel. Each gives `Link` objects; the protocol above them is the same for all."""
