"""Every test starts from one seed, on one thread, with uninitialised memory filled with NaN."""

from __future__ import annotations

import importlib.util
import inspect
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what CUDA asks for when results must repeat
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, one program after another
settings.register_profile("lamina", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("lamina")


def pytest_configure(config):
    if not importlib.util.find_spec("numba"):  # most recurrences warn then that they are slow
        config.addinivalue_line("filterwarnings", "ignore::lamina.errors.SlowPathWarning")


@pytest.fixture(autouse=True)
def _controlled():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Deterministic mode fills torch.empty with NaN: a buffer that nobody writes cannot pass unseen.
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():  # torch's own settings, which a training run in this process may have changed
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    yield
    torch.use_deterministic_algorithms(False)


class _Patches:
    """What Triton's interpreter changes in triton.language for a launch, once a launch.

    By itself it does so again in every call of one kernel function by another: more than half of its time.
    """

    def __init__(self, patch) -> None:
        self.patch, self.languages, self.scopes = patch, {}, {}

    def __call__(self, fn):
        key = self.languages.get(fn)
        if key is None:
            modules = (v for v in fn.__globals__.values() if inspect.ismodule(v))
            names = (m.__name__ for m in modules)
            key = self.languages[fn] = frozenset(n for n in names if n.startswith("triton.language"))
        if not self.scopes or key not in self.scopes:
            self.scopes[key] = self.patch(fn)
        return self

    def restore(self) -> None:
        """The launch is over."""
        for scope in reversed(self.scopes.values()):
            scope.restore()
        self.scopes = {}


@pytest.fixture(autouse=True, scope="session")
def _quicker_interpreter():
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        interpreter = importlib.import_module("triton.runtime.interpreter")
        interpreter._patch_lang = _Patches(interpreter._patch_lang)


@pytest.fixture
def bfloat16_is_rounded(monkeypatch):
    """In Triton's interpreter as on a GPU; by itself it cuts off, which is twice the error."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    cut_off = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return cut_off(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def full_float32():
    """Multiply float32 in full on a GPU: our kernels follow the switch of cuDNN's recurrences, which allows TF32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ.get("LAMINA_TEST_DEVICE", "cpu"))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not keywords, which name the folders too
            item.add_marker(skip)
