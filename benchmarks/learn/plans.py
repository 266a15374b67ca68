"""Which runs answer which question."""

from __future__ import annotations

from .loop import Run

SEEDS = (0, 1, 2)
TASKS = ("video", "classify", "detect, 128x128", "generate, CIFAR-10", "generate, MNIST")
LARGE = ("detect, 256x256", "classify, 128x128")
PAIR = ("dense", "tail")
OTHERS = ("windows", "local", "strided")
PICTURES = (1000, 5000, None)
NOISE = ("dense", "dense, dropout", "tail", "tail, fixed seed", "tail, few sweeps")
BIAS = ("dense", "tail", "windows")
QUESTIONS = ("tasks", "large", "noise", "bias", "others", "small noise", "small bias")  # small ones: for a CPU


def runs(question: str) -> list[Run]:
    """Seed by seed, the longest first."""
    if question == "tasks":
        return [Run(task, name, seed) for seed in SEEDS for task in TASKS for name in PAIR]
    if question == "large":
        return [Run(task, name, seed) for seed in SEEDS for task in LARGE for name in PAIR]
    if question == "others":
        return [Run(task, name, 0) for name in OTHERS for task in TASKS]
    base = "digits" if question.startswith("small") else "plain"
    if question.endswith("noise"):
        return [Run(base, name, seed, count) for seed in SEEDS for count in PICTURES for name in NOISE]
    if question.endswith("bias"):
        sets, names = (base, f"{base}, shuffled"), (*BIAS, "local" if base == "plain" else "local, 64 keys")
        return [Run(x, name, seed, count) for seed in SEEDS for x in sets for count in PICTURES for name in names]
    raise ValueError(f"question must be one of {QUESTIONS}, got {question!r}")
