"""Adam as published and as in the authors' code, and gradient clipping; CUDA graphs can capture both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from .errors import one_of

LATE = 1e8  # steps after which both of Adam's bias corrections are 1 in any precision


class Adam(torch.optim.Adam):
    """Adam with torch's ``bias_correction="correct"`` (Kingma and Ba's algorithm 1) or the authors' ``"kiros"``.

    The code of order embeddings and skip-thoughts corrects by 0.1^t and 0.001^t where the algorithm has 0.9^t and
    0.999^t. This is almost no correction after the first update, so the first few hundred updates are 2 to 6.5 times
    as long.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        bias_correction: str = "correct",
    ) -> None:
        one_of("bias_correction", bias_correction, ("correct", "kiros"))
        groups = list(params)
        tensors = [p for item in groups for p in (item["params"] if isinstance(item, dict) else [item])]
        cuda = bool(tensors) and all(p.is_cuda for p in tensors)
        super().__init__(groups, lr, betas, eps, fused=True, capturable=cuda)
        self.bias_correction = bias_correction
        if bias_correction == "kiros":
            self._step_supports_amp_scaling = False  # unlike torch's fused step, this one needs unscaled gradients

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but give moments the strides of their parameters, which the fused step requires."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.empty_like(p).copy_(state[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self.bias_correction == "correct":
            return super().step(closure)  # type: ignore[no-any-return]
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in self._of_one_step(group["params"]):
                self._kiros_update(params, group)
        return loss

    def _of_one_step(self, params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
        """Count an update of each parameter with a gradient, and return those with equal counts together.

        Counts on a GPU are not read, so there each parameter stays alone.
        """
        groups: dict[Any, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                step = self._state_of(p)["step"].add_(1)
                groups.setdefault(p if p.is_cuda else step.item(), []).append(p)
        return groups.values()

    def _kiros_update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Apply p -= lr sqrt(1 - 0.001^t)/(1 - 0.1^t) m/(sqrt(v) + eps), 1 - beta in place of beta.

        torch's fused update does it: after so many steps as in ``late`` its own corrections are 1.
        """
        beta1, beta2 = group["betas"]
        states = [self.state[p] for p in params]
        step = states[0]["step"]
        rate = group["lr"] * torch.sqrt(1 - (1 - beta2) ** step) / (1 - (1 - beta1) ** step)
        adam(
            params,
            [cast(Tensor, p.grad) for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.full_like(step, LATE) for _ in params],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], limit: float, by: str = "global") -> None:
    """Scale gradients so that their norm is at most ``limit``, jointly ("global") or per tensor.

    No value is read on the host, so a CUDA graph can capture the call.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    if by == "global" and norms:
        norms = [torch.linalg.vector_norm(torch.stack(norms))] * len(norms)
    for gradient, norm in zip(gradients, norms):
        gradient.mul_((limit / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1))
