"""Specifications of GPUs, for compilation and planning; nothing here is measured.

Memory and bandwidth are from NVIDIA's datasheets of the H100 SXM, H200 SXM and B200. The usable
memory and the on-chip sizes are those that the devices report (XLA has the same numbers for many
cards in xla/backends/gpu/target_config/specs).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Specification of a GPU model."""

    name: str  # as the driver reports it
    compute_capability: tuple[int, int]  # major and minor
    memory_bytes: int  # device memory that programs can use
    bandwidth: float  # peak bytes per second of device memory, which no program reaches
    l2_bytes: int  # cache shared by all cores
    cores: int  # streaming multiprocessors
    clock_ghz: float  # highest clock of the cores

    def target_config(self) -> str:
        """XLA's target description for compilation: a `GpuTargetConfigProto` as text."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              name: "{self.name}"
              device_vendor: "NVIDIA Corporation"
              platform_version: "Compute Capability {major}.{minor}a"
              cuda_compute_capability {{
                major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
              }}
              device_memory_size: {self.memory_bytes}
              memory_bandwidth: {self.bandwidth:.0f}
              l2_cache_size: {self.l2_bytes}
              core_count: {self.cores}
              clock_rate_ghz: {self.clock_ghz}
              {_SAME_FOR_ALL}
            }}
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        """


# Limits of both compute capability 9.0 and 10.0 (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"), and the CUDA 13 versions in the packages.
_SAME_FOR_ALL = """
              fpus_per_core: 128
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_core: 233472
              shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
              device_address_bits: 64
              driver_version: "13.0.0" runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
"""

GPUS = {
    # 80 GB at 3.35 TB/s.
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 84942979072, 3.35e12, 52428800, 132, 1.98),
    # 141 GB at 4.8 TB/s.
    "h200": Gpu("NVIDIA H200", (9, 0), 151397597184, 4.8e12, 52428800, 132, 1.98),
    # 180 to 192 GB, depending on the system, at 8 TB/s; the memory size is that of a DGX.
    "b200": Gpu("NVIDIA B200", (10, 0), 191514411008, 8.0e12, 132644864, 148, 1.965),
}
