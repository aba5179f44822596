"""Profiles: where and how to run, written once and used by name (`corral up MODEL --on NAME`).

A profile is a TOML file; docs/profiles.md lists its keys. Reading is strict, finding is by name, and resolving
happens once: flag > environment > project's file > user's file > default.
"""

from corral.profile.contract import ProfileSettings
from corral.profile.merging import AskedValues, asked_of_plan, merged
from corral.profile.profile import Listed, Profile, all_profiles, environment, load_profile
from corral.profile.storage import with_storage

__all__ = [
    "AskedValues",
    "Listed",
    "Profile",
    "ProfileSettings",
    "all_profiles",
    "asked_of_plan",
    "environment",
    "load_profile",
    "merged",
    "with_storage",
]
