"""Fixtures and settings that every test file shares."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import pytest
from hypothesis import settings
from tiny_folders import PairFolders, write_pair
from tiny_models import (
    PARITY_CONFIG,
    forgetful_target,
    imitating_drafter,
    random_drafter,
    random_target,
)

from redrafter_jax.__main__ import main
from redrafter_jax.drafters.base import LoadedHead
from redrafter_jax.drafters.recurrent_head import RecurrentConfig
from redrafter_jax.models.target import Target

# The interpreter of GPU kernels blocks one of XLA's threads for each warpgroup that waits, and on
# two cores XLA would have too few to go on.
os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))

# Meshes are tested on devices that share this one CPU; everything else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)
# LLVM takes fewer passes, for most of a test's time is compilation, and splits no program among
# threads, for the workers fill the cores. And a device that waits 40 s for another would end the
# process: a loaded machine is slow.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=1",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        os.environ.get("XLA_FLAGS", ""),
    )
)

# Compiling is most of what tests do: a program that the other worker, a process that a test started
# or an earlier run has compiled is read from here.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "programs"
for name, value in {
    "jax_compilation_cache_dir": str(PROGRAMS),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)

settings.register_profile(
    "reproducible", derandomize=True, deadline=None, database=None, max_examples=25
)
settings.load_profile("reproducible")


def pytest_configure(config: pytest.Config) -> None:
    """Lets `make test` and CI compile with XLA's older loop emitters, in a third of the time.

    The newer ones, which users have, make each loop by way of MLIR; `make test-all` keeps them.
    """
    if config.option.markexpr in ("not long", "not further"):
        options = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
        os.environ["XLA_FLAGS"] = f"{options} {os.environ['XLA_FLAGS']}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and JAX runs on {jax.default_backend()} here")


_tests_done = itertools.count(1)


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
    """Lets programs go that were compiled for earlier tests, when there are very many.

    Each is mapped into memory in several regions. Linux gives a process 65,530 by default, and XLA
    ends it where the next one is refused.
    """
    yield
    # Counting takes some milliseconds; the tests that compile most add a thousand regions each.
    if next(_tests_done) % 10:
        return
    regions = Path("/proc/self/maps")
    if regions.exists() and regions.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def target() -> Target:
    """Random weights, grouped-query attention, two layers; its text depends on its history."""
    return random_target(PARITY_CONFIG)


@pytest.fixture(scope="session")
def drafter() -> LoadedHead:
    """Random weights of the width of `target`: nearly always wrong."""
    config = RecurrentConfig(
        vocab_size=PARITY_CONFIG.vocab_size,
        hidden_size=PARITY_CONFIG.hidden_size,
        exit_dim=40,
        num_draft_layers=1,
    )
    return random_drafter(config)


@pytest.fixture(scope="session")
def habitual_target() -> Target:
    """Mostly, but not only, the current token decides the next: easy to draft for."""
    return forgetful_target(memory=0.15)


@pytest.fixture(scope="session")
def good_drafter(habitual_target: Target) -> LoadedHead:
    """Mostly right about `habitual_target`."""
    return imitating_drafter(habitual_target)


@pytest.fixture(scope="session")
def folders(
    tmp_path_factory: pytest.TempPathFactory, habitual_target: Target, good_drafter: LoadedHead
) -> PairFolders:
    """Where the two lie, for tests that leave them as they are."""
    return write_pair(tmp_path_factory.mktemp("models"), habitual_target, good_drafter)


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Less of a module's time goes to LLVM: for tests of what surrounds the programs.

    What the worker has compiled before is used as it is.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        # In programs that a test starts, too.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a refusal comes late."""

    def compiled(*arguments: Any, **options: Any) -> None:
        pytest.fail("reached a compiled function")

    for name in ("empty_rows", "read_rows", "decode_rows"):
        monkeypatch.setattr(f"redrafter_jax.engine.runner.{name}", compiled)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as programs have it by default: tests that are started with `&` inherit none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Shape annotations off, as they are for users: the library's own checks must speak."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def run_redrafter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, stdout and stderr of `redrafter ...`, in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redrafter", *arguments])
        code: Any = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
