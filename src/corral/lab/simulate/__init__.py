"""A discrete-event simulation of vLLM servers behind a gateway, fitted to measured runs, with its error beside it."""
