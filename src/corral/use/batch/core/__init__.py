"""The resumable core: rows, ledger, lock, endpoints and the loop that turns rows into results."""
