"""Keras 3's optimizers, as far as the programs need them: the rules and defaults, on this package's interface."""

from __future__ import annotations

import torch

from tfstyle_dist.train import TFOptimizer


class SGD(TFOptimizer):
    def __init__(self, rate, momentum=0.0, nesterov=False):
        super().__init__("SGD")
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov

    def make_slots(self, value):
        return {"momentum": torch.zeros_like(value)} if self.momentum else {}

    def update(self, value, grad, slots):
        if not self.momentum:
            value.sub_(grad * self.rate)
            return
        m = slots["momentum"]
        m.mul_(self.momentum).sub_(grad * self.rate)
        value.add_(m * self.momentum - grad * self.rate if self.nesterov else m)


class Adam(TFOptimizer):
    def __init__(self, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        super().__init__("Adam")
        self.rate, self.b1, self.b2, self.epsilon, self.steps = rate, beta_1, beta_2, epsilon, 0

    def begin_step(self):
        self.steps += 1

    def make_slots(self, value):
        return {"m": torch.zeros_like(value), "v": torch.zeros_like(value)}

    def update(self, value, grad, slots):
        m, v = slots["m"], slots["v"]
        alpha = self.rate * (1 - self.b2**self.steps) ** 0.5 / (1 - self.b1**self.steps)
        m.add_((grad - m) * (1 - self.b1))
        v.add_((grad * grad - v) * (1 - self.b2))
        value.sub_(m * alpha / (v.sqrt() + self.epsilon))


class Adagrad(TFOptimizer):
    def __init__(self, rate, initial_accumulator_value=0.1, epsilon=1e-7):
        super().__init__("Adagrad")
        self.rate, self.initial, self.epsilon = rate, initial_accumulator_value, epsilon

    def make_slots(self, value):
        return {"accumulator": torch.full_like(value, self.initial)}

    def update(self, value, grad, slots):
        a = slots["accumulator"]
        a.add_(grad * grad)
        value.sub_(grad * self.rate / (a + self.epsilon).sqrt())


class RMSprop(TFOptimizer):
    def __init__(self, rate, rho=0.9, momentum=0.0, epsilon=1e-7):
        super().__init__("RMSprop")
        self.rate, self.rho, self.momentum, self.epsilon = rate, rho, momentum, epsilon

    def make_slots(self, value):
        return {"velocity": torch.zeros_like(value), "momentum": torch.zeros_like(value)}

    def update(self, value, grad, slots):
        v, m = slots["velocity"], slots["momentum"]
        v.mul_(self.rho).add_(grad * grad * (1 - self.rho))
        step = grad * self.rate / (v + self.epsilon).sqrt()
        value.sub_(m.mul_(self.momentum).add_(step) if self.momentum else step)


MAKERS = {"sgd": SGD, "adam": Adam, "adagrad": Adagrad, "rmsprop": RMSprop}
