"""One server over several engines, each in a process of its own, by Ray Serve."""
