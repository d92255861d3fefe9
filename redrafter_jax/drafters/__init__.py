"""Drafters, a file for each kind: `base` states the contract, `bind` lists them."""
