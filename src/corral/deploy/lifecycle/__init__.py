"""A deployment from wish to end: bringing up, state, successors, renewal, tunnels, and which server is meant."""
