"""Profiles: where and how to run, written once and used by name (`corral up MODEL --on NAME`).

A profile is a TOML file; docs/profiles.md lists its keys. Reading is strict, finding is by name, and resolving
happens once: flag > environment > project's file > user's file > default.
"""

from corral.profile.contract import Settings
from corral.profile.merging import merged
from corral.profile.profile import ENVIRONMENT, Listed, Profile, all_profiles, load_profile
from corral.profile.storage import with_storage

__all__ = ["ENVIRONMENT", "Listed", "Profile", "Settings", "all_profiles", "load_profile", "merged", "with_storage"]
