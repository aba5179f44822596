"""OpenAI's batch API over HTTP, in front of the same runner."""
