"""Complex parameters, conjugates and Fourier transforms train as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from two_replicas import assert_all_close, both_process_models, examples, half, mse, on_all

import tfstyle_dist as td


class Spectrum(nn.Module):
    """A filter in the frequencies, and a bilinear form of complex features and their conjugates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.filter = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.form = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) / 6)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1) * self.filter
        energy = ((spectrum @ self.form) * spectrum.conj()).sum(1).real
        return (self.scale * energy + torch.fft.irfft(spectrum, n=10, dim=1).sum(1)).unsqueeze(1)

    def numbers(self) -> torch.Tensor:
        """All of its weights in a row."""
        with torch.no_grad():
            return torch.cat([torch.view_as_real(p + 0).reshape(-1) for p in (self.filter, self.form)])


@both_process_models
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_spectrum_trains_as_on_one_device(strategy: td.Strategy, kind: str, process_model: str) -> None:
    with strategy.scope():
        model = Spectrum()
    reference = Spectrum()
    # Some parts, as the imaginary one of a mean, have rounding errors as gradients: Adam would make steps of them.
    # With a larger rate SGD diverges, from where it depends on the first weights, which each kind of device draws anew.
    options = {"lr": 1e-4, "momentum": 0.9} if kind == "SGD" else {"lr": 0.01, "eps": 1e-3}
    optimizer, expected = (getattr(torch.optim, kind)(m.parameters(), **options) for m in (model, reference))

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(4):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(on_all(strategy, model.numbers), reference.numbers())
