"""A deployment from request to end: bringing up, state, waiting, tunnels."""
