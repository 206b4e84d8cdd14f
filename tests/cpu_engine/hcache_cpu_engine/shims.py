"""Import-time stand-ins for what a CPU-only set of wheels lacks.

- `torchvision._meta_registrations`: the wheel on the package index is a CUDA build and registers
  shapes of operators that a CPU torch does not have; an empty module is enough.
- `triton`: SGLang decorates its kernels at import. The stub accepts that and raises at launch.
- `sgl_kernel`: operators for CPUs are imported by name; those of speculative decoding are in
  `speculation`, others raise when they are called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def install() -> None:
    """Make the stand-ins importable. Call before torch, torchvision or sglang are imported."""
    stub_torchvision()
    stubs: dict[str, type[StubModule]] = {"sgl_kernel": SglKernelStub}
    if os.environ.get("HCACHE_CPU_ENGINE_TRITON") != "real":
        stubs["triton"] = TritonStub
    sys.meta_path.insert(0, StubFinder(stubs))
    sys.meta_path.insert(0, BeforeSGLang())


def stub_torchvision() -> None:
    """Alone enough for transformers, which imports torchvision when it is installed."""
    name = "torchvision._meta_registrations"
    sys.modules.setdefault(name, ModuleType(name))


class BeforeSGLang(importlib.abc.MetaPathFinder):
    """A torch for CUDA gives CUDA's module, GPU or not, to who names no device. Modules of SGLang
    ask for it while they are imported, so it is the CPU's when the first one is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            import torch

            original = torch.get_device_module
            torch.get_device_module = lambda device=None: original(device or "cpu")


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the named packages, and where a stub is `nested` for every module below it."""

    def __init__(self, stubs: dict[str, type[StubModule]]):
        self.stubs = stubs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.split(".", maxsplit=1)[0]
        if package not in self.stubs or (fullname != package and not self.stubs[package].nested):
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="hcache_cpu_engine", is_package=self.stubs[package].nested
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.stubs[spec.name.split(".")[0]](spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the module's class answers attribute access."""


class StubModule(ModuleType):
    """A module that answers attribute access instead of holding code."""

    nested = False


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} was called, but the CPU engine has only an import stub of it")

    refused.__name__ = name.rsplit(".", 1)[-1]
    return refused


class SglKernelStub(StubModule):
    """Has every `*_cpu` function and nothing else, as on a build without CUDA."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_cpu"):
            from . import speculation  # it imports torch

            return getattr(speculation, name, None) or _refuse(f"{self.__name__}.{name}")
        raise AttributeError(name)


class PlaceholderMeta(type):
    """Lets a placeholder class stand for a type, a constant or a nested namespace."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__name__}.{name}")


class Placeholder(metaclass=PlaceholderMeta):
    """What `tl.constexpr`, `tl.float32`, `triton.Config`... are in the stub."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.value = args[0] if args else None


def _placeholder(name: str) -> type[Placeholder]:
    return PlaceholderMeta(name, (Placeholder,), {})


class JITFunction:
    """A kernel that can be decorated and introspected but not launched."""

    def __init__(self, fn: Any):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__doc__ = getattr(fn, "__doc__", None)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return _refuse(f"triton kernel {self.__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _refuse(f"triton kernel {self.__name__}")()


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit`, `@jit(...)`, `@autotune(...)` and `@heuristics(...)` alike."""
    if args and callable(args[0]):
        return JITFunction(args[0])
    return lambda fn: fn if isinstance(fn, JITFunction) else JITFunction(fn)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class NoDriver:
    """`triton.runtime.driver` as it behaves without a GPU: asking it anything is an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("0 active drivers ([]). There should only be one.")


TRITON_NAMES: dict[str, Any] = {
    "__version__": "3.0.0",
    "jit": _decorator,
    "autotune": _decorator,
    "heuristics": _decorator,
    "constexpr_function": lambda fn: fn,
    "cdiv": _cdiv,
    "next_power_of_2": _next_power_of_2,
    "JITFunction": JITFunction,
    "driver": NoDriver(),
}


class TritonStub(StubModule):
    """`triton` or any module below it."""

    nested = True

    def __getattr__(self, name: str) -> Any:
        if name in TRITON_NAMES:
            return TRITON_NAMES[name]
        if name.startswith("__"):
            raise AttributeError(name)
        value = _placeholder(name)
        setattr(self, name, value)
        return value
