"""vLLM's environments: installing them, and the flags that they accept."""

PINNED_VERSION = "0.32.0"  # the vLLM that Corral installs
