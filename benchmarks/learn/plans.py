"""Which runs answer which question."""

from __future__ import annotations

from .loop import Run

SEEDS = (0, 1, 2)
TASKS = ("classify", "detect, 128x128", "video", "generate, MNIST", "generate, CIFAR-10", "classify, 128x128",
         "detect, 256x256")  # fmt: skip
ATTENTIONS = ("dense", "tail", "windows", "local", "strided")
PICTURES = (1000, 5000, None)
NOISE = ("dense", "dense, dropout", "tail", "tail, fixed seed", "tail, few sweeps")
BIAS = ("dense", "tail", "windows", "local")


def runs(question: str) -> list[Run]:
    """The most telling ones first: dense and the tail, then the others; seed by seed."""
    if question == "tasks":
        pairs = [("dense", "tail"), ("windows", "local", "strided")]
        return [Run(task, name, seed) for names in pairs for seed in SEEDS for task in TASKS for name in names]
    if question == "noise":
        return [Run("plain", name, seed, count) for seed in SEEDS for count in PICTURES for name in NOISE]
    if question == "bias":
        sets = ("plain", "plain, shuffled")
        return [Run(x, name, seed, count) for seed in SEEDS for x in sets for count in PICTURES for name in BIAS]
    raise ValueError(f"question must be 'tasks', 'noise' or 'bias', got {question!r}")
