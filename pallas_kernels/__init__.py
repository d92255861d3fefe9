"""GPU kernels with plain-array interfaces; depends only on JAX."""
