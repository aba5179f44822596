"""A deployment from request to end: bringing up, state, successors, renewal, tunnels, and which server is meant."""
