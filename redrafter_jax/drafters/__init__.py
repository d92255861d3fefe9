"""Drafters: `base` defines the interface, and `kinds` lists the drafters that have weights."""
