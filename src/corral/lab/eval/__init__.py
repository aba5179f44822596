"""Tasks of lm-evaluation-harness, answered by a served model."""
