"""The device of the servers on this machine: a GPU, or the CPU engine of the tests."""

from dataclasses import dataclass
from importlib.util import find_spec

from bench.harness.options import CPU_ATTENTION, Device
from hcache_backend.plan.profile import processor_name
from hcache_backend.sglang.compat import sglang_version


class MachineError(RuntimeError):
    """SGLang cannot serve here; one line that names the missing part."""


@dataclass(frozen=True)
class Machine:
    """The device of a program's servers: ``name`` of GPU or processor, version of SGLang."""

    device: Device
    name: str
    sglang: str

    @property
    def exact_attention(self) -> str:
        """The attention backend that computes float32 exactly."""
        return CPU_ATTENTION if self.device == "cpu" else "torch_native"


def find_machine() -> Machine:
    """The GPU if there is one, otherwise the CPU engine.

    Raises:
        MachineError: SGLang is not installed.
    """
    if find_spec("sglang") is None:
        raise MachineError("SGLang is not installed in this Python: run `make setup`")
    import torch

    if torch.cuda.is_available():
        return Machine("cuda", torch.cuda.get_device_name(), sglang_version())
    return Machine("cpu", processor_name(), sglang_version())
