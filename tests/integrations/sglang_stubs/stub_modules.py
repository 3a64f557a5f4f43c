"""Stand-ins for packages that SGLang imports when it starts and does not use on CPUs: triton, torchvision and others.

This folder is on PYTHONPATH of SGLang's own processes in tests, nowhere else. Its dist-info folder is a plug-in of
SGLang that does without the kernels that have no CPU wheel.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types


class StubClass(type):
    """Attributes of stub classes (members of enums) are None."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)


class Stub(types.ModuleType):
    """A module that has whatever is asked for: classes for capital names, modules for others; also a decorator."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = sys.modules.get(full)
        if value is None and name[0].isupper():
            bases = (Exception,) if name.endswith(("Error", "Resources")) else ()
            body = {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None}
            value = StubClass(name, bases, body)
        elif value is None:
            value = Stub(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self):
        return False


class Finder:
    """Makes modules inside a stub package stubs, too."""

    def __init__(self, root):
        self._root = root

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{self._root}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, module)


def replace(name):
    """Called by the module `name` while it is imported: put a stub in its place."""
    spec = sys.modules[name].__spec__
    stub = Stub(name)
    stub.__file__, stub.__version__, stub.__spec__ = spec.origin, "3.0.0", spec
    sys.modules[name] = stub
    sys.meta_path.insert(0, Finder(name))
    return stub


def plug_in():
    """A plug-in of SGLang: torch's own threads instead of those of kernels that have no wheel."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register("sglang.srt.distributed.bootstrap._init_cpu_threads_env", _set_threads, HookType.REPLACE)


def _set_threads(*, local_omp_cpuid=None, dist_init_method=None):
    import torch  # noqa: PLC0415

    if local_omp_cpuid:
        torch.set_num_threads(len(str(local_omp_cpuid).split(",")))
