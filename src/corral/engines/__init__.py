"""vLLM's environments: installing them, and the flags that they accept."""
