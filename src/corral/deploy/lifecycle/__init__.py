"""A deployment from its request to its end: bringing up, status, successors, tunnels, and finding a server."""
