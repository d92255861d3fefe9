"""GPU kernels under plain-array contracts; imports JAX alone."""
