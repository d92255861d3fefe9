"""Drafters: `base` defines the interface, `kinds` registers kinds with weights."""
