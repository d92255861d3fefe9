"""One server over several engines, each in its own process, with Ray Serve."""
