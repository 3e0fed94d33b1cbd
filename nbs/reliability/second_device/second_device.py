"""A second device for machines without a GPU: build it, make it the default, watch it.

    import second_device
    second_device.install()             # needs g++ and ninja
    with second_device.watch() as events:
        ...                             # train
    print(events.count("stall"))

It refuses tensors of two devices in one operation, and counts kernels, copies and
stalls: the moments at which a GPU would make the program wait for it.
"""
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

NAME = "seconddevice"
_here = Path(__file__).parent


def can_be_built() -> bool:
    "Whether this machine has a compiler and ninja."
    ninja = shutil.which("ninja") or importlib.util.find_spec("ninja")
    return bool(shutil.which("g++") and ninja and sys.platform.startswith("linux"))


class Event(NamedTuple):
    kind: str # "kernel", "stall", "copy in", "waited copy in", "copy out"
    name: str # of the operation
    bytes: int # that were copied
    line: str # that caused it: "prompt_packing/trainer/loaders.py:10 function"


class Events(list):
    "What happened on the device, in order."
    def count(self, kind: str, by: str = "") -> int:
        "Events of a kind, in lines that begin with `by`."
        return sum(e.kind == kind and e.line.startswith(by) for e in self)

    def lines(self, *kinds: str) -> Counter:
        "How often each line and operation caused events of these kinds."
        return Counter((e.line, e.name) for e in self if e.kind in kinds)


_watched: list[Events] = []


def _line():
    "The innermost line of one of these packages, which has caused an event."
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        for package in ("prompt_packing", "transformers", "accelerate", "peft"):
            if f"/{package}/" in file:
                place = file.rsplit(f"/{package}/", 1)[1]
                return f"{package}/{place}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere" # the backward pass has a thread without Python


def _note(kind, name, size):
    if _watched:
        event = Event(kind, name, size, _line())
        for events in _watched:
            events.append(event)


@contextlib.contextmanager
def watch():
    "Collects the `Events` of the `with` block."
    events = Events()
    _watched.append(events)
    try:
        yield events
    finally:
        _watched.remove(events)


seeds = [] # that the device was given


def _module(extension):
    "What `torch.cuda` is for CUDA."
    def manual_seed(seed):
        seeds.append(seed)
        extension.manual_seed(seed)

    class Device(contextlib.nullcontext):
        "As `torch.cuda.device(0)`."

    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device, module.Stream = Device, types.SimpleNamespace
    module.manual_seed = module.manual_seed_all = manual_seed
    module.get_rng_state = lambda device=NAME: extension.get_rng_state()
    module.set_rng_state = lambda state, device=NAME: extension.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda *args, **kwargs: True
    module.synchronize = lambda device=None: _note("stall", "synchronize", 0)
    module.empty_cache = lambda: None
    return module


def install() -> torch.device:
    "Build the device, register it, and let accelerate choose it. Once a process."
    from torch.utils.cpp_extension import load
    folder = Path(os.environ.get("SECOND_DEVICE_BUILD", tempfile.mkdtemp()))
    folder.mkdir(parents=True, exist_ok=True)
    source = str(_here / "second_device.cpp")
    extension = load("second_device_extension", [source], build_directory=str(folder),
                     extra_cflags=["-O1", "-w"])
    extension.report_to(_note)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=False)
    device = torch.device(NAME, 0)
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device) # which Trainers then choose
    install.extension = extension
    return device


@contextlib.contextmanager
def on_cpu():
    "Trainers that are made meanwhile choose the CPU."
    device = os.environ.pop("ACCELERATE_TORCH_DEVICE")
    try:
        yield
    finally:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device


def refuse_float64(refused: bool) -> None:
    "As Apple's GPUs do."
    install.extension.refuse_float64(refused)
