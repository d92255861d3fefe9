"""Meshes, collectives and several processes."""
