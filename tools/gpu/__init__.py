"""Measurements of kernels, decode steps and texts on a GPU, in pieces that can be interrupted."""
