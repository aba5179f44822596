"""One local address for a chain of deployments: new requests go to the newest that is ready, running ones finish."""
