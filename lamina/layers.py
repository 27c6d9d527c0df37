"""Feed-forward layers: layer norm, its noisy form, and linear and convolutional layers with a norm built in.

Each class is a subclass of the torch.nn class of the same name, with the same arguments and parameter names, so that
code written for ``nn.Linear`` (initialisers, parameter groups) keeps working. Additional options are keyword-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import functional, reference
from .baselines import BatchNorm, weight_norm_gain
from .checks import check_kind, describe, epsilon, fail, finite, one_of, positive_int, show
from .kernels import BACKENDS, Request, norm
from .placements import NORMS
from .reference import ACTIVATIONS, EPS_MODES, Activation, statistics_dtype
from .scripting import leaf, refuse, scriptable, symbolic

# For small N the normal draw 1 + xi_sigma comes close to 0: E[1/|1 + xi|] does not exist, and at N <= 16 (standard
# deviation >= 0.35) single draws would dominate a batch. The floor limits the scale of a unit to sqrt(10). At N = 64 it
# is five standard deviations away and has no effect.
SPREAD_FLOOR = 0.1


class LayerNorm(nn.LayerNorm):
    """Layer norm (Eq. 3): gain (a - mu)/sigma + bias, mu and sigma over the last axes of each case.

    Arguments, parameters and state_dict are those of ``torch.nn.LayerNorm``. Additional options:

    eps, eps_mode: sqrt(var + eps) for "var" (torch's), sqrt(var) + eps for "std"; eps may be 0.
    activation: None or a name of ``ACTIVATIONS``, applied to the result.
    backend: "auto" or the name of a backend; ``lamina.explain(layer, x)`` reports which one runs.

    ``layer(x, residual)`` normalises x + residual and returns the pair (result, sum).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        eps_mode: str = "var",
        activation: str | None = None,
        backend: str = "auto",
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape:
            raise fail("normalized_shape must have at least one axis", repr(normalized_shape), "Pass the last sizes.")
        for size in shape:
            positive_int("normalized_shape", size)
        one_of("eps_mode", eps_mode, EPS_MODES)
        one_of("backend", backend, BACKENDS["layer_norm"])
        if activation is not None:
            one_of("activation", activation, ACTIVATIONS)
        super().__init__(list(shape), epsilon(eps), elementwise_affine, bias, device, dtype)
        self.eps_mode = eps_mode
        self.activation = activation
        self.backend = backend

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise [*, *normalized_shape]; with a residual return the pair (result, input + residual)."""
        if symbolic(input):
            return leaf(self, input, residual=residual)
        if residual is None and self.activation is None and self.backend == "auto":
            shape, eps = self.normalized_shape, self.eps
            quick = functional.quick_layer_norm(input, shape, self.weight, self.bias, eps, self.eps_mode)
            if quick is not None:
                return quick
        if self.backend == "triton":
            cached = self._run_cached(input, residual)
            if cached is not None:
                return cached
        check_kind(f"LayerNorm({list(self.normalized_shape)})", input, self.weight, half_input=True)
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, self.eps_mode,
            activation=self.activation, residual=residual, backend=self.backend,
        )  # fmt: skip

    def __prepare_scriptable__(self) -> Any:
        """Return the same layer in the form that torch.jit.script compiles."""
        if type(self) not in (LayerNorm, _ScriptableLayerNorm) or self.activation or not _torchs_eps(self):
            return refuse(self)
        return scriptable(self, _ScriptableLayerNorm)

    def _run_cached(self, input: Tensor, residual: Tensor | None) -> Any:
        """Run the cached launch if an equivalent call has passed the checks before; else return None."""
        weight = self.weight
        if weight is not None and getattr(input, "dtype", None) is not weight.dtype:  # check_kind decides on these
            return None
        shape, eps, mode = self.normalized_shape, self.eps, self.eps_mode
        cached = norm.again(input, shape, weight, self.bias, eps, mode, self.activation, residual)
        return cached if cached is None or residual is not None else cached[0]

    def backend_request(self, input: Tensor | None = None, residual: Tensor | None = None) -> Request:
        """Return the request that ``lamina.explain`` decides on."""
        if input is None:
            return _layer_norm_request(self.weight, self.eps, self.eps_mode)
        shape = self.normalized_shape
        return functional.norm_request(input, shape, self.eps, self.eps_mode, self.weight, residual)

    def extra_repr(self) -> str:
        return super().extra_repr() + _shown(self, {"eps_mode": "var", "activation": None, "backend": "auto"})


class NoisyLayerNorm(LayerNorm):
    """Layer norm with the noise of batch norm's sampled statistics as a regulariser, in training only.

    out = gain (ahat + xi_mu)/sqrt|1 + xi_sigma| + bias, where ahat is the normalised input, and xi_mu and xi_sigma
    model the errors of a mean and a variance estimated from ``num_samples`` = N cases, with Var xi_mu = 1/N. In
    evaluation, and for N = inf, this is ``LayerNorm``.

    num_samples: N, a number of cases or math.inf.
    variance: "corrected", Var xi_sigma = 2/N, the relative variance of a Gaussian sample's variance; or "printed",
        1/N, as printed in the paper.
    noise: "normal", with |1 + xi_sigma| kept above ``SPREAD_FLOOR``; or "chi2", 1 + xi_sigma ~ chi^2_{N-1}/(N-1),
        the distribution of the sample variance (the output's variance is finite for N >= 4).
    noise_shape: "case" draws per case and unit; "unit" draws per unit, shared by all cases as in batch norm.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        num_samples: float,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        eps_mode: str = "var",
        backend: str = "auto",
        variance: str = "corrected",
        noise: str = "normal",
        noise_shape: str = "case",
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, eps_mode=eps_mode, backend=backend
        )
        one_of("variance", variance, ("corrected", "printed"))
        one_of("noise", noise, ("normal", "chi2"))
        one_of("noise_shape", noise_shape, ("case", "unit"))
        self.variance, self.noise, self.noise_shape = variance, noise, noise_shape
        self.num_samples = self._checked_samples(num_samples)

    def _checked_samples(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise fail("num_samples must be a number of at least 1", show(value), "Pass the batch size to imitate.")
        if self.noise == "chi2" and self.variance == "printed":
            remedy = "Use noise='normal' for the paper's 1/N."
            raise fail("noise='chi2' needs variance='corrected'", "variance='printed'", remedy)
        if self.noise == "chi2" and value < 2:
            raise fail("noise='chi2' needs num_samples >= 2", f"num_samples={value}", "Pass 2 or more.")
        return value

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise [*, *normalized_shape]; with a residual return the pair (result, input + residual)."""
        if symbolic(input):
            return leaf(self, input, residual=residual)
        if not self.training or math.isinf(self.num_samples):
            return super().forward(input, residual)
        if residual is not None:
            total = input + residual
            return self.forward(total), total
        check_kind(f"NoisyLayerNorm({list(self.normalized_shape)})", input, self.weight, half_input=True)
        z = functional.layer_norm(
            input.to(statistics_dtype(input.dtype)),
            self.normalized_shape,
            eps=self.eps,
            eps_mode=self.eps_mode,
            backend=self.backend,
        )
        like = z if self.noise_shape == "case" else z.new_empty(self.normalized_shape)
        shift = _normal(like) / math.sqrt(self.num_samples)
        return reference.affine((z + shift) * self._spread(like).rsqrt(), self.weight, self.bias).to(input.dtype)

    def _spread(self, like: Tensor) -> Tensor:
        """Return |1 + xi_sigma|, the sampled variance relative to the true one."""
        if self.noise == "chi2":
            half = (self.num_samples - 1) / 2  # chi^2_k / k = Gamma(k/2, 1) / (k/2)
            if like.is_meta:  # torch 2.11 has no meta kernel for gamma draws
                return torch.empty_like(like)
            return torch._standard_gamma(torch.full_like(like, half)) / half
        deviation = math.sqrt((2 if self.variance == "corrected" else 1) / self.num_samples)
        return (1 + deviation * _normal(like)).abs().clamp(min=SPREAD_FLOOR)

    def extra_repr(self) -> str:
        defaults = {"variance": "corrected", "noise": "normal", "noise_shape": "case"}
        return f"{super().extra_repr()}, num_samples={self.num_samples}" + _shown(self, defaults)


class NormalisedLayer(nn.Module):
    """Base class of ``Linear`` and ``Conv2d``: f(g/sigma (a - mu) + b) of the summed inputs a = W x.

    norm: "layer", mu and sigma over all units of one case; "batch", over the cases for each unit; "weight",
        mu = 0 and sigma_i = ||w_i||; None, neither norm nor gain, as in the torch.nn layer.
    activation: f, None, a name of ``ACTIVATIONS`` or a callable.
    eps, eps_mode: sqrt(var + eps) for "var", sqrt(var) + eps for "std"; eps may be 0.
    gain_init: initial value of ``gain``. None means 1, and under weight norm the row norms of ``weight``, which keep
        the function at first (after changing ``weight``, set the gain with ``baselines.weight_norm_gain``).
    momentum, unbiased, population: options of batch norm, see ``BatchNorm``.
    backend: backend of layer norm, "auto" or a name.

    Weights are drawn as in torch under every norm, so that one seed gives all variants the same weights. Biases start
    at 0 under a norm, and as in torch without one.
    """

    weight: Tensor
    bias: Any  # torch declares different types in Linear and Conv2d
    gain: nn.Parameter | None
    statistics: BatchNorm | None
    # torch's constructor calls reset_parameters before the norm is installed.
    norm: str | None = None

    def _install(
        self,
        unit_shape: tuple[int, ...],
        *,
        norm: str | None,
        activation: str | Activation | None,
        eps: float,
        eps_mode: str,
        gain_init: float | None,
        momentum: float | None,
        unbiased: bool,
        population: str,
        backend: str,
    ) -> None:
        """Check the options and add gains, biases and statistics to a newly constructed torch layer."""
        one_of("norm", norm, NORMS)
        one_of("eps_mode", eps_mode, EPS_MODES)
        one_of("backend", backend, BACKENDS["layer_norm"])
        self.norm, self.eps, self.eps_mode, self.backend = norm, epsilon(eps), eps_mode, backend
        self.gain_init = None if gain_init is None else finite("gain_init", gain_init)
        _check_activation(activation)
        self.activation = activation
        self.register_parameter("gain", None if norm is None else self._unit_parameter(unit_shape))
        if norm is not None and self.bias is not None:
            self.bias = self._unit_parameter(unit_shape)
        self.statistics = None
        if norm == "batch":
            self.statistics = BatchNorm(
                self.weight.shape[0], eps, momentum, False, True, self.weight.device, self.weight.dtype,
                unbiased=unbiased, population=population, eps_mode=eps_mode,
            )  # fmt: skip
        self._reset_norm()

    def _unit_parameter(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=self.weight.device, dtype=self.weight.dtype))

    def reset_parameters(self) -> None:
        """Redraw the weights as torch does; reset the other parameters and the statistics to their initial values."""
        super().reset_parameters()  # type: ignore[misc]
        if self.norm is not None:
            self._reset_norm()

    def _reset_norm(self) -> None:
        if self.gain is None:
            return
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.norm == "weight" and self.gain_init is None:
            with torch.no_grad():
                self.gain.copy_(weight_norm_gain(self.weight))
        else:
            nn.init.constant_(self.gain, 1.0 if self.gain_init is None else self.gain_init)
        if self.statistics is not None:
            self.statistics.reset_parameters()

    def _operands(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the product; under layer and batch norm the bias is added after the norm."""
        if self.norm == "weight" and self.gain is not None:
            return reference.weight_norm(self.weight, self.gain), self.bias
        return self.weight, self.bias if self.norm is None else None

    def _normalise(self, summed: Tensor) -> Tensor:
        """Return g/sigma (a - mu) + b of summed inputs a [N, units, *positions]; a no-op unless layer or batch norm."""
        if self.norm == "layer":
            shape = summed.shape[1:]
            gain, bias = _per_unit(self.gain, shape), _per_unit(self.bias, shape)
            out: Tensor = functional.layer_norm(
                summed, shape, gain, bias, self.eps, self.eps_mode, backend=self.backend
            )
            return out
        if self.statistics is None:
            return summed
        if self.gain is not None and self.gain.dim() == 1:
            return self.statistics.normalise(summed, self.gain, self.bias)
        z = self.statistics.normalise(summed.to(statistics_dtype(summed.dtype)))
        return reference.affine(z, self.gain, self.bias).to(summed.dtype)

    def _activate(self, z: Tensor) -> Tensor:
        if self.activation is None:
            return z
        return ACTIVATIONS[self.activation](z) if isinstance(self.activation, str) else self.activation(z)

    def backend_request(self, input: Tensor | None = None) -> Request | None:
        """Return the request that ``lamina.explain`` decides on, or None if there is only one backend."""
        if self.norm != "layer":
            return None
        return _layer_norm_request(self.weight if input is None else input, self.eps, self.eps_mode)

    def __prepare_scriptable__(self) -> Any:
        """Return the same layer in the form that torch.jit.script compiles."""
        plain = self.norm is None or (self.norm == "layer" and _torchs_eps(self))
        if type(self) not in (Linear, _ScriptableLinear) or self.activation is not None or not plain:
            return refuse(self)
        return scriptable(self, _ScriptableLinear)

    def extra_repr(self) -> str:
        defaults = {"activation": None, "eps": 1e-5, "eps_mode": "var", "gain_init": None, "backend": "auto"}
        return f"{super().extra_repr()}, norm={self.norm!r}" + _shown(self, defaults)


class Linear(NormalisedLayer, nn.Linear):
    """f(g/sigma (W x - mu) + b): a linear layer with its norm and non-linearity.

    Input [..., in_features], output [..., out_features]; batch norm treats all leading axes as cases. Arguments up to
    ``dtype`` and the parameters ``weight``, ``bias`` are those of ``torch.nn.Linear``; a norm adds ``gain``
    [out_features]. With ``norm=None`` this is ``torch.nn.Linear`` and loads its state_dicts.

    ``NormalisedLayer`` describes the shared options.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | None = "layer",
        activation: str | Activation | None = None,
        eps: float = 1e-5,
        eps_mode: str = "var",
        gain_init: float | None = None,
        momentum: float | None = 0.1,
        unbiased: bool = False,
        population: str = "running",
        backend: str = "auto",
    ) -> None:
        positive_int("in_features", in_features)
        positive_int("out_features", out_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._install(
            (out_features,), norm=norm, activation=activation, eps=eps, eps_mode=eps_mode, gain_init=gain_init,
            momentum=momentum, unbiased=unbiased, population=population, backend=backend,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if symbolic(input):
            return leaf(self, input)  # type: ignore[no-any-return]
        name = f"Linear({self.in_features}, {self.out_features})"
        x = check_kind(name, input, self.weight, half_input=False)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise fail(f"{name} needs an input [..., {self.in_features}]", describe(x), "Check the last axis.")
        summed = F.linear(x, *self._operands())
        cases = summed.reshape(-1, self.out_features)
        return self._activate(self._normalise(cases).reshape(summed.shape))


class _ScriptableLayerNorm(LayerNorm):
    """``LayerNorm`` in scriptable form; torch.jit.script leaves it in the model, where it acts as the same layer."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return LayerNorm.forward(self, input, residual)  # type: ignore[no-any-return]
        if residual is not None:
            raise ValueError("A scripted LayerNorm takes no residual, got one. Add it to the input before the layer.")
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def _get_name(self) -> str:
        return "LayerNorm"


class _ScriptableLinear(Linear):
    """``Linear`` in scriptable form."""

    __annotations__ = {"norm": str | None}  # torch.jit does not read inherited annotations

    def forward(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return Linear.forward(self, input)
        if self.norm is None:
            return F.linear(input, self.weight, self.bias)
        summed = F.linear(input, self.weight)
        return F.layer_norm(summed, [self.out_features], self.gain, self.bias, self.eps)

    def _get_name(self) -> str:
        return "Linear"


class Conv2d(NormalisedLayer, nn.Conv2d):
    """f(g/sigma (W * x - mu) + b): a convolution with its norm and non-linearity.

    Input [N, in_channels, H, W] or [in_channels, H, W]. Layer norm takes mu and sigma over all channels and positions
    of one case, batch norm over cases and positions for each channel, weight norm ||w|| of each filter. Arguments up
    to ``dtype`` and the parameters ``weight``, ``bias`` are those of ``torch.nn.Conv2d``; a norm adds ``gain``. With
    ``norm=None`` this is ``torch.nn.Conv2d`` and loads its state_dicts.

    gain_shape: "channel", gains and biases [C]; or "neuron", [C, H_out, W_out], one per unit as in the paper, for
        layer and batch norm.
    input_size: (H, W) of the inputs, required by "neuron"; if set, inputs of another size raise an error.

    ``NormalisedLayer`` describes the shared options.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | None = "layer",
        activation: str | Activation | None = None,
        gain_shape: str = "channel",
        input_size: tuple[int, int] | None = None,
        eps: float = 1e-5,
        eps_mode: str = "var",
        gain_init: float | None = None,
        momentum: float | None = 0.1,
        unbiased: bool = False,
        population: str = "running",
        backend: str = "auto",
    ) -> None:
        positive_int("in_channels", in_channels)
        positive_int("out_channels", out_channels)
        positive_int("groups", groups)
        for what, pair in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)):
            for size in pair if isinstance(pair, (tuple, list)) else (pair,):
                positive_int(what, size)
        one_of("padding_mode", padding_mode, ("zeros", "reflect", "replicate", "circular"))
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )  # fmt: skip
        self.gain_shape = gain_shape
        self.input_size = _checked_size(input_size)
        self._install(
            self._unit_shape(norm), norm=norm, activation=activation, eps=eps, eps_mode=eps_mode, gain_init=gain_init,
            momentum=momentum, unbiased=unbiased, population=population, backend=backend,
        )  # fmt: skip

    def _unit_shape(self, norm: str | None) -> tuple[int, ...]:
        one_of("gain_shape", self.gain_shape, ("channel", "neuron"))
        if self.gain_shape == "channel":
            return (self.out_channels,)
        if norm not in ("layer", "batch") or self.input_size is None:
            raise fail(
                "gain_shape='neuron' needs norm='layer' or 'batch' and the size of the inputs",
                f"norm={norm!r}, input_size={self.input_size}",
                "Pass input_size=(H, W), or use gain_shape='channel'.",
            )
        return self._output_shape(self.input_size)

    def _output_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return [C, H_out, W_out] from a convolution on the meta device, which computes shapes only."""
        weight = self.weight.to("meta")
        probe = torch.empty(1, self.in_channels, *size, device="meta", dtype=weight.dtype)
        try:
            shape = tuple(self._conv_forward(probe, weight, None).shape[1:])
        except RuntimeError:
            shape = (0,)  # some torch versions raise if the kernel does not fit, others return sizes below 1
        if min(shape) < 1:
            raise fail(
                "input_size must leave the kernel at least one position",
                f"{size} for a kernel of {self.kernel_size}",
                "Pass a larger input_size, more padding or a smaller kernel.",
            )
        return shape

    def forward(self, input: Tensor) -> Tensor:
        """Map [N, in_channels, H, W] or [in_channels, H, W] to the convolution's output shape."""
        if symbolic(input):
            return leaf(self, input)  # type: ignore[no-any-return]
        x = self._checked(input)
        summed = self._conv_forward(x if x.dim() == 4 else x.unsqueeze(0), *self._operands())
        out = self._activate(self._normalise(summed))
        return out if x.dim() == 4 else out.squeeze(0)

    def _checked(self, input: Tensor) -> Tensor:
        name = f"Conv2d({self.in_channels}, {self.out_channels})"
        x = check_kind(name, input, self.weight, half_input=False)
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            shapes = f"[N, {self.in_channels}, H, W] or [{self.in_channels}, H, W]"
            raise fail(f"{name} needs an input {shapes}", describe(x), "Check the channel axis.")
        if self.input_size is not None and tuple(x.shape[-2:]) != self.input_size:
            raise fail(
                f"{name} with input_size needs inputs of size {list(self.input_size)}",
                describe(x),
                "Resize the input, or build the layer with that input_size (or with none and gain_shape='channel').",
            )
        return x

    def extra_repr(self) -> str:
        return super().extra_repr() + _shown(self, {"gain_shape": "channel", "input_size": None})


def _torchs_eps(layer: LayerNorm | NormalisedLayer) -> bool:
    """Return whether eps has the same meaning as in torch's layer norm."""
    return layer.eps_mode == "var" and layer.eps > 0


def _normal(like: Tensor) -> Tensor:
    """Draw normal noise, without randn_like: torch.compile (2.13) merges two such calls, so that xi_mu = xi_sigma."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device)


def _per_unit(parameter: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Expand a per-channel parameter [C] to ``shape`` [C, *positions]; return other parameters unchanged."""
    if parameter is None or parameter.dim() == len(shape):
        return parameter
    return parameter.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


def _check_activation(activation: object) -> None:
    if isinstance(activation, str):
        one_of("activation", activation, ACTIVATIONS)
    elif activation is not None and not callable(activation):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise TypeError(f"activation must be a name or a callable, got {describe(activation)}. Pass one of {names}.")


def _checked_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise fail("input_size must be two numbers, (H, W)", show(size), "Pass for example (28, 28).")
    return positive_int("input_size", size[0]), positive_int("input_size", size[1])


def _layer_norm_request(like: Tensor | None, eps: float, eps_mode: str) -> Request:
    like = torch.empty(0) if like is None else like
    return Request("layer_norm", like.device, like.dtype, eps, eps_mode)


def _shown(layer: nn.Module, defaults: Mapping[str, object]) -> str:
    """Format the options of a layer that differ from their defaults, for its repr."""
    values = {name: getattr(layer, name) for name in defaults}
    return "".join(f", {name}={value!r}" for name, value in values.items() if value != defaults[name])
