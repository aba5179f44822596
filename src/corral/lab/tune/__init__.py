"""`corral tune`: which of vLLM's settings serve a workload best, measured, with intervals."""
