"""One address for fleets and deployments: requests are routed by model, prompt and load."""
