"""Requests that come and go over one decode state."""
