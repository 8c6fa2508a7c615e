"""AmoebaNets in NumPy and float64, in inference: an oracle that shares no code with Keras."""

from __future__ import annotations

import math

import numpy as np

from imagenet_fast.base.keras_2 import name_of

# As published: pairs of operations, each with the state that it takes; the states returned.
CELLS = {
    "d": {
        "normal": (
            "1 1x1 + 1 max3, 1 none + 0 1x7, 0 1x1 + 0 1x7, 2 max3 + 2 none, 1 avg3 + 5 1x1",
            [0, 3, 4, 6],
        ),
        "reduction": (
            "0 max2 + 0 max3, 2 none + 1 3x3, 2 1x7 + 2 max3, 3 none + 1 max2, 2 avg3 + 3 1x1",
            [4, 5, 6],
        ),
    },
    "b": {
        "normal": (
            "1 1x1 + 1 max3, 1 none + 0 sep3, 1 1x1 + 0 sep3, 2 1x1 + 2 none, 1 avg3 + 5 1x1",
            [0, 3, 4, 6],
        ),
        "reduction": (
            "0 max2 + 0 max3, 2 none + 1 3x3, 2 dil5 + 2 max3, 3 none + 1 sep3, 4 avg3 + 3 1x1",
            [5, 6],
        ),
    },
}
# Strides of the convolutions of an operation whose own stride is s.
CONVS = {"1x1": "s", "3x3": "1s1", "1x7": "1s11", "sep3": "s1", "dil5": "s1"}


class AmoebaNet:
    """The function of a model, or of blocks, by what their weights are called."""

    def __init__(self, variant, variables, epsilon=1e-5):
        self.cells = CELLS[variant]
        self.epsilon = epsilon
        self.variables = {}
        for variable in variables:
            layer, role = name_of(variable).split("/")[-2:]
            self.variables.setdefault(layer, {})[role] = variable.numpy().astype(np.float64)

    def logits(self, images, stages):
        """Of normalized images, by a network with so many normal cells in each stage."""
        x = self.norm(convolve(images, self.variables["stem1_conv"]["kernel"], 2), "stem1_bn")
        states = self.cell((x, x), "stem2", "reduction")
        states = self.cell(states, "stem3", "reduction")
        for stage in (1, 2, 3):
            if stage > 1:
                states = self.cell(states, f"stage{stage}_reduction", "reduction")
            for i in range(stages):
                states = self.cell(states, f"stage{stage}_cell{i + 1}", "normal")
        head = self.variables["logits"]
        return np.maximum(states[0], 0).mean((1, 2)) @ head["kernel"] + head["bias"]

    def cell(self, inputs, name, kind):
        first = self.relu_conv_norm(inputs[0], f"{name}_input1", 1)
        second = inputs[1]
        if second.shape[1] > first.shape[1]:
            second = self.halve(second, f"{name}_input2")
        elif second.shape[-1] != first.shape[-1]:
            second = self.relu_conv_norm(second, f"{name}_input2", 1)
        states = [first, second]
        text, outputs = self.cells[kind]
        number = 0
        for pair in text.split(", "):
            total = 0
            for term in pair.split(" + "):
                number += 1
                state, operation = term.split()
                stride = 2 if kind == "reduction" and int(state) < 2 else 1
                total = total + self.operation(
                    states[int(state)], operation, stride, f"{name}_operation{number}"
                )
            states.append(total)
        return np.concatenate([states[i] for i in outputs], -1), inputs[0]

    def operation(self, x, operation, stride, name):
        if operation[:3] in ("max", "avg"):
            return pool(x, operation[:3], int(operation[3]), stride)
        for i, own in enumerate(CONVS.get(operation, ""), start=1):
            own_stride = stride if own == "s" else 1
            dilation = 2 if operation == "dil5" else 1
            x = self.relu_conv_norm(x, name, own_stride, i, dilation)
        return x

    def relu_conv_norm(self, x, name, stride, number=1, dilation=1):
        own = self.variables[f"{name}_conv{number}"]
        x = np.maximum(x, 0)
        if "kernel" in own:
            x = convolve(x, own["kernel"], stride)
        else:
            each = own["depthwise_kernel"][..., 0]
            x = sum(
                part * each[at]
                for at, part in windows(x, each.shape[:2], stride, dilation=dilation)
            )
            x = x @ own["pointwise_kernel"][0, 0]
        return self.norm(x, f"{name}_bn{number}")

    def halve(self, x, name):
        x = np.maximum(x, 0)
        after = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])[:, 1:, 1:]
        halves = [
            part[:, ::2, ::2] @ self.variables[f"{name}_conv1{i}"]["kernel"][0, 0]
            for i, part in enumerate((x, after), start=1)
        ]
        return self.norm(np.concatenate(halves, -1), f"{name}_bn1")

    def norm(self, x, name):
        own = self.variables[name]
        x = (x - own["moving_mean"]) / np.sqrt(own["moving_variance"] + self.epsilon)
        return x * own["gamma"] + own["beta"]


def windows(x, size, stride, fill=0, dilation=1):
    """What each element of a kernel meets, with TensorFlow's padding "same"."""
    pads, counts = [(0, 0)], []
    for pixels, taps in zip(x.shape[1:3], size):
        counts.append(math.ceil(pixels / stride))
        missing = max(0, (counts[-1] - 1) * stride + (taps - 1) * dilation + 1 - pixels)
        pads.append((missing // 2, missing - missing // 2))
    x = np.pad(x, [*pads, (0, 0)], constant_values=fill)
    for i in range(size[0]):
        for j in range(size[1]):
            rows = slice(i * dilation, i * dilation + (counts[0] - 1) * stride + 1, stride)
            columns = slice(j * dilation, j * dilation + (counts[1] - 1) * stride + 1, stride)
            yield (i, j), x[:, rows, columns]


def convolve(x, kernel, stride):
    return sum(part @ kernel[at] for at, part in windows(x, kernel.shape[:2], stride))


def pool(x, kind, size, stride):
    if kind == "max":
        return np.max([part for _, part in windows(x, (size, size), stride, -np.inf)], 0)
    inside = windows(np.ones_like(x), (size, size), stride)
    total = sum(part for _, part in windows(x, (size, size), stride))
    return total / sum(part for _, part in inside)
