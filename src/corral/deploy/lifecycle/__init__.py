"""A deployment from its request to its end: bringing up, status, waiting, tunnels."""
