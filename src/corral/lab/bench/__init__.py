"""Measuring a served model: load, metrics, validity, the distance to the limit; runs are folders with raw rows."""
