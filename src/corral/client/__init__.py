"""One request to a server that answers as OpenAI's does: where it goes, how it is sent, timed, read and judged."""
