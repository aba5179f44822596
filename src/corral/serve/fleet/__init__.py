"""Several servers of one model: starting and ending them, keeping as many as are wanted, following the load."""
