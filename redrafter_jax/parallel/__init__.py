"""Meshes, collectives and processes."""
