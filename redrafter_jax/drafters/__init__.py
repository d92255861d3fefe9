"""Drafters, a file for each kind: `base` states the contract, `kinds` has records."""
