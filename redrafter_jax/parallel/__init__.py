"""Meshes of devices, collectives, and jobs of several processes."""
