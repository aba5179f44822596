"""Profiles: where and how to run, written once and used by name (`corral up MODEL --on NAME`).

A profile is a TOML file; docs/profiles.md lists its keys. Reading is strict, finding is by name, and resolving
happens once: flag > environment > project's file > user's file > default.
"""
